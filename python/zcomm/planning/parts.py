"""A batch in parts in a plan: a model and its inputs, traced with ``split_batch``, without it, and for fewer samples.

[Note: planned parts] A step of S samples can be one pass in M parts ([Note: batch in parts]), or M micro-steps of S / M
samples. Micro-steps keep the activations of S / M samples in all blocks, and read
offloaded weights M times. Parts keep the inputs of all blocks for S samples, and the inside of one block for S / M.
They read weights once, and compute forward twice.
Traces are on the meta device; each one is made at its first use.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zcomm.memory.split_batch import parts_of, split_batch
from zcomm.planning.gathers import as_arguments
from zcomm.planning.live_memory import LiveMemory, live_memory
from zcomm.planning.planned_offload import PlannedOffload
from zcomm.planning.work import Work, tensors_of, work_of
from zcomm.zero.layout.unit_policy import repeated_blocks

WHOLE = 0  # parts of blocks that are not checkpointed by ``split_batch``


class Batches:
    """Batches of a model. inputs: of a micro-batch, on the meta device. tier: of offloaded activations, or None.

    blocks: names of the modules that run in parts: those that the program has prepared, or the repeated blocks.
    own: parts that the program has given, else WHOLE. samples: of a micro-batch; 0 if no input has a batch.
    """

    def __init__(self, model: nn.Module, inputs: Any, tier: str | None = None) -> None:
        self._model, self._inputs, self._tier = model, inputs, tier
        given = parts_of(model)
        self.blocks = list(given) or [name for name, _ in repeated_blocks(model)]
        self.own = max(given.values(), default=WHOLE)
        shapes = [tensor.shape for tensor in tensors_of(list(as_arguments(inputs))) if tensor.dim() > 0]
        self.samples = shapes[0][0] if shapes else 0
        self._lives: dict[tuple[int, int], LiveMemory] = {}
        self._works: dict[tuple[int, int], Work] = {}

    def inputs(self, samples: int) -> Any:
        """Return inputs of so many samples."""
        return _with_samples(self._inputs, self.samples, samples)

    @property
    def tokens(self) -> int | None:
        """The tokens of a sample: the numbers in its first tensor, if they are whole numbers."""
        first = next((tensor for tensor in tensors_of(list(as_arguments(self._inputs))) if tensor.dim() > 0), None)
        if first is None or first.is_floating_point() or first.dim() != 2:
            return None
        return first.shape[1]

    @contextmanager
    def divided(self, parts: int) -> Iterator[None]:
        """Let the blocks run in ``parts`` parts, as the program does afterwards again. Raises: ValueError without
        blocks."""
        if parts and not self.blocks:
            raise ValueError("the model has no repeated blocks: call zcomm.split_batch in the function that makes it")
        modules = [self._model.get_submodule(name) for name in self.blocks]
        before = list(parts_of(self._model).values())
        handle = split_batch(modules, max(parts, 1)) if modules else None
        if handle is not None and not parts:
            handle.remove()
        try:
            yield
        finally:
            if handle is not None and parts:
                handle.remove()
            for module, own in zip(modules, before, strict=False):
                split_batch([module], own)

    def live(self, samples: int, parts: int) -> LiveMemory:
        """Return the memory of a pass. Raises: the model's errors; ValueError, TypeError or RuntimeError of
        ``split_batch``."""
        if (samples, parts) not in self._lives:
            offload = None if self._tier is None else PlannedOffload(self._tier)
            args, kwargs = as_arguments(self.inputs(samples))
            with self.divided(parts):
                self._lives[samples, parts] = live_memory(self._model, args, kwargs, offload)
        return self._lives[samples, parts]

    def work(self, samples: int, parts: int) -> Work:
        """Return the work of a pass. Raises: as ``live``."""
        if (samples, parts) not in self._works:
            args, kwargs = as_arguments(self.inputs(samples))
            with self.divided(parts):
                self._works[samples, parts] = work_of(self._model, *args, **kwargs)
        return self._works[samples, parts]


def divisors(count: int) -> list[int]:
    """Return the numbers of equal parts that ``count`` samples can have, 1 first."""
    return [parts for parts in range(1, count + 1) if count % parts == 0]


def list_names(blocks: Sequence[str]) -> str:
    """Return the lists of the blocks, as a program writes them: model.layers."""
    lists = dict.fromkeys(f"model.{name.rpartition('.')[0]}".rstrip(".") for name in blocks)
    return " and ".join(lists)


def _with_samples(value: Any, count: int, samples: int) -> Any:
    """Return ``value`` with tensors of ``samples`` in dim 0 instead of ``count``."""
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 or value.shape[0] != count or count == samples:
            return value
        return value.new_empty((samples, *value.shape[1:]))
    if isinstance(value, dict):
        return type(value)({key: _with_samples(item, count, samples) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        made = [_with_samples(item, count, samples) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value
