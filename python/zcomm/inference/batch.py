"""plan: the largest batch that fits a limit on memory, and the tokens per second that a drive allows.

[Note: batch] A forward reads the same bytes for any batch, so tokens per second grow with the batch until computing
takes longer than reading. A batch needs memory for cache and activations. The rest of the limit must hold the units in
use, at the smallest setting that ``memory=`` may choose. Cache and activations are estimated from the configuration,
and grow with the batch and the length of its sequences.
Pure arithmetic, except for the look at the memory of this process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zcomm.inference.experts import routed
from zcomm.inference.folder import library_for
from zcomm.inference.quantized import Quantized, finer_names
from zcomm.memory.sizes import as_nbytes
from zcomm.memory.swap_file import StrPath
from zcomm.zero import MemoryLimit, Offload, Units
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.limit import candidates, holders, inside_nbytes
from zcomm.zero.memory.plan import Settings, plan_memory
from zcomm.zero.options import Tier, as_precision

_OTHER_NBYTES = 64 << 20  # of activations: small tensors, buffers of kernels
_BUCKET_MB = 8.0


@dataclass(frozen=True)
class BatchPlan:
    """A batch of sequences.

    batch: sequences; 0: not even one fits. sequence_nbytes: of cache and activations of one, in the process's memory.
    weights_nbytes: of all weights, in their form. A forward reads fewer if some are resident, or not routed.
    least_nbytes: that the process holds in any case: its present contents, libraries, units in use.
    """

    batch: int
    sequence_nbytes: int
    weights_nbytes: int
    least_nbytes: int

    def activations_of(self, batch: int) -> int:
        """Return the bytes of cache and activations of ``batch`` sequences, for ``MemoryLimit(activations=)``."""
        return batch * self.sequence_nbytes + _OTHER_NBYTES

    def tokens_per_s(self, rate: float) -> float:
        """Return the bound by reading: batch x ``rate`` (bytes per second of the drives) / bytes of the weights."""
        return self.batch * rate / self.weights_nbytes


def plan(
    model: nn.Module | StrPath,
    length: int,
    *,
    memory: int | str,
    most: int = 1024,
    weights: Tier = "nvme",
    quantize: Literal["int8", "int4"] | None = None,
    kv: str = "device",
    device: torch.device | str | None = None,
) -> BatchPlan:
    """Return the largest batch of ``stream(model, weights, quantize, memory=memory)`` in this process, up to ``most``.

    model: of transformers, or a folder of ``save_pretrained``; no weight is read. length: tokens of a sequence at the
    end. Of a model on ``device``, ``memory`` is of the host, which holds the cache with kv="cpu".
    Raises: ValueError for a model without a configuration of a language model.
    """
    model = model if isinstance(model, nn.Module) else _without_weights(Path(os.fspath(model)))
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(f"plan: {type(model).__name__} has no configuration of a language model of transformers")
    dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
    stored = None if quantize is None else Quantized(quantize, finer_names(model))
    wanted = Settings(
        3,
        Offload(params=weights, stored=stored),
        1,
        as_precision(dtype),
        TileForm((), dtype),
        _BUCKET_MB,
        1,
        Units(indexed=routed(model)),
        shared=False,
    )
    held = (least_and_weights(model, settings) for settings in reversed([*candidates(wanted)]))
    least, padded = next(each for each in held if each is not None)  # the last candidates need least
    _, whole = least_and_weights(model, wanted) or (0, padded)
    least += inside_nbytes(model)
    on_device = device is not None and torch.device(device).type != "cpu"
    place = kv if on_device else "process"
    room = MemoryLimit(as_nbytes(memory), activations=0).room - least
    each = sequence_nbytes(config, length, dtype.itemsize, place)
    batch = (room - _OTHER_NBYTES) // each if each else most
    return BatchPlan(max(0, min(most, batch)), each, whole, least)


def _without_weights(path: Path) -> nn.Module:
    """Return the model of a folder on the meta device."""
    library = library_for(path)
    with torch.device("meta"):
        config = library.AutoConfig.from_pretrained(path, local_files_only=True)
        model: nn.Module = library.AutoModelForCausalLM.from_config(config)
    return model


def least_and_weights(model: nn.Module, settings: Settings) -> tuple[int, int] | None:
    """Return the bytes that an optimizer of ``settings`` holds, and the bytes of its weights; None: it has no room."""
    try:
        found = plan_memory(model, settings, ())
    except ValueError:  # a module is larger than a unit may be
        return None
    return sum(holders(found, settings, 0).values()), sum(tier["parameters"] for tier in found.memory.values())


def sequence_nbytes(config: Any, length: int, itemsize: int, place: str = "process") -> int:
    """Estimate the bytes of cache and activations of a sequence of a language model, in the memory of its process.

    length: tokens at the end. A layer's cache is copied when it grows. The first forward has the hidden states of the
    whole prompt, several of them at a time. place: "process": of a model on the CPU. Of others "cpu" or "device": of
    the cache; the rest is on the device.
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = 2 * heads * width * itemsize * (config.num_hidden_layers + 2)
    if place != "process":
        return int(length * cache) if place == "cpu" else 0
    hidden = 6 * config.hidden_size + 3 * (getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    scores = config.num_attention_heads * length * 4  # of kernels that keep them
    return int(length * (cache + hidden * itemsize + scores) + 4 * 4 * config.vocab_size)
