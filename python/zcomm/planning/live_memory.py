"""Live memory: bytes of all tensors, at each moment of forward and backward of one micro-batch.

[Note: live memory] The micro-batch is traced on the meta device, so nothing is computed or allocated. A storage that an
operator makes counts from then on until autograd and the program have dropped it. So it has the inside of a
block that is recomputed, the parts of a batch ([Note: batch in parts]), and the sums of gradients.
Weights, buffers and the working space inside of operators do not count.
The gradient of a parameter leaves as soon as autograd has finished it. On the CPU training keeps some of them longer
(kept_gradients.py), which depends on the layout: ``peak_nbytes`` takes the buckets.
Attention runs as one operator if the CPU has one for its arguments. The meta device would keep all weights of it.
Activations in another tier: ``offload_activations`` itself runs, over buffers and a swap file without memory.
A module that runs in parts keeps a random state of the CPU for each checkpoint.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from zcomm.memory.split_batch import parts_of
from zcomm.planning.fused_attention import FusedAttention
from zcomm.planning.kept_gradients import Bucket, KeptGradients
from zcomm.planning.planned_offload import PlannedOffload
from zcomm.planning.work import check_untrained, run_backward, storage, tensors_of


@dataclass(frozen=True)
class LiveMemory:
    """The changes of a micro-batch's memory, in order. changes: bytes, or a parameter with a gradient that autograd has
    finished. offloaded: by tier, bytes of activations in it, and of buffers for them."""

    changes: Sequence[tuple[int, nn.Parameter | None]]
    offloaded: Mapping[str, int]

    def peak_nbytes(self, buckets: Sequence[Bucket] = ()) -> int:
        """Return the most bytes at a moment, on the device. buckets: gradients that stay; others leave at once."""
        kept = KeptGradients(buckets, [param for _, param in self.changes if param is not None])
        now = most = 0
        for nbytes, param in self.changes:
            now += nbytes if param is None else kept.arrived(param)
            most = max(most, now)
        return most


def live_memory(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    offload: PlannedOffload | None = None,
) -> LiveMemory:
    """Trace forward of ``model(*args, **kwargs)`` and backward from the sum of its floating outputs.

    offload: forward runs within it. On another device than meta, buffers and random numbers change as in training.
    Raises: ValueError for a model that an optimizer trains; errors of the model.
    """
    check_untrained(model)
    recorder = _Recorder()
    with ExitStack() as stack:
        stack.callback(_drop_gradients, model)
        for param in model.parameters():
            if param.requires_grad:
                stack.callback(param.register_post_accumulate_grad_hook(recorder.finished).remove)
        for name in parts_of(model):
            stack.callback(model.get_submodule(name).register_forward_pre_hook(recorder.checkpointed).remove)
        inputs = tensors_of([args, dict(kwargs or {})])
        given = {storage(tensor): tensor.untyped_storage().nbytes() for tensor in inputs}
        recorder.changed(sum(given.values()))
        with torch.enable_grad(), FusedAttention(), recorder:
            with offload or nullcontext():
                output = model(*args, **(kwargs or {}))
            run_backward(output)
            del output
    return LiveMemory(recorder.changes, {} if offload is None else offload.nbytes_by_tier())


def _drop_gradients(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


class _Recorder(TorchDispatchMode):
    """The storages that operators make, and when they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.changes: list[tuple[int, nn.Parameter | None]] = []
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._state_nbytes = torch.get_rng_state().nbytes
        self._recomputed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [tensor for tensor in tensors_of(out) if storage(tensor) not in self._live]
        if made:
            given = {storage(tensor) for tensor in tensors_of([args, kwargs])}
            for tensor in made:
                if storage(tensor) not in given:
                    self._add(tensor.untyped_storage())
        return out

    def _add(self, made: torch.UntypedStorage) -> None:
        key, nbytes = made._cdata, made.nbytes()

        def freed(_: object) -> None:
            del self._live[key]
            self.changed(-nbytes)

        if nbytes and key not in self._live:
            self._live[key] = weakref.ref(made, freed)
            self.changed(nbytes)

    def changed(self, nbytes: int) -> None:
        self.changes.append((nbytes, None))

    def finished(self, param: Any) -> None:
        """Take a gradient that autograd has finished."""
        param.grad = None
        self.changes.append((0, param))

    def checkpointed(self, module: nn.Module, args: Any) -> None:
        """Count the random state of a part, until the next part is recomputed."""
        if torch._C._current_graph_task_id() < 0:
            self.changed(self._state_nbytes)
        elif self._recomputed:
            self.changed(-self._state_nbytes)
        self._recomputed = torch._C._current_graph_task_id() >= 0
