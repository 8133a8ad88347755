"""stream: a model for inference that is never whole in memory.

[Note: streamed model] A streamed model is a model of stage 3 that is not trained. A ZeroOptimizer without a rule holds
its weights as shards on a drive or in host memory, and gathers a unit before its modules run. This package adds only
the needs of inference. These are building from a folder, the choice of read-ahead, the turn from one token to the next,
and counters.
Thread rule: the main thread.
Source: ZeRO-Inference (arXiv:2206.01861 describes its kernels; weights are read as in ZeRO-Infinity, arXiv:2104.07857).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.inference.experts import RoutedExperts, routed_modules
from zcomm.inference.folder import load_folder
from zcomm.inference.quantized import Quantized, finer_names
from zcomm.memory.swap_file import StrPath
from zcomm.zero import MemoryLimit, Offload, Units, ZeroOptimizer
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.unit_policy import repeated_blocks
from zcomm.zero.module_hook import Hook
from zcomm.zero.options import Tier
from zcomm.zero.registry import open_parts, optimizers_of
from zcomm.zero.units.store import UnitStore
from zcomm.zero.units.unit import Unit

_AHEAD_NBYTES = 64 << 20  # to be read ahead, so that a drive's queue is never empty
_MOST_AHEAD = 8
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Streamed:
    """The weights of a model of ``stream``: counters, bytes, the end.

    opt: the ZeroOptimizer that holds them; it does not train.
    """

    def __init__(self, model: nn.Module, opt: ZeroOptimizer, experts: Sequence[nn.Module] = ()) -> None:
        self.opt, self.passes = opt, 0
        self._store = open_parts(opt).store
        self._routed: RoutedExperts | None = None
        if experts and isinstance(self._store, UnitStore):
            self._routed = RoutedExperts(experts, self._store, self._nbytes_of)
        self._begin = self._swap()
        self._hook = model.register_forward_hook(_AfterForward(self))

    def after_forward(self) -> None:
        """Count a forward of the model, and start to read the first units of the next one."""
        self.passes += 1
        if isinstance(self._store, UnitStore):
            self._store.life.read_ahead()

    @property
    def streamed_nbytes(self) -> int:
        """Bytes of this rank's weights that are gathered for each forward. The rest is resident."""
        if not isinstance(self._store, UnitStore):
            return 0
        return sum(self._nbytes(bucket) for unit in self._store.units if not unit.keep for bucket in unit.buckets)

    @property
    def pass_nbytes(self) -> int:
        """Bytes that a forward reads from this rank's drives, once passes have a steady order.

        These are all units of blocks but one of the last, which a spare buffer keeps; none if all fit into the buffers.
        A head that is read by rows is read whole, by each module that has it. An embedding by rows adds the rows that
        it looks up. Experts add those that tokens are routed to: see ``stats``.
        """
        if not isinstance(self._store, UnitStore):
            return 0
        store, model = self._store, open_parts(self.opt).model
        sizes = [self._on_drive(unit) for unit in store.units]
        blocks = [nbytes for unit, nbytes in zip(store.units, sizes, strict=True) if unit.in_ring]
        total = sum(blocks) - sum(blocks[-2:-1]) if store.memory.gives_way else 0
        heads = [id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
        return total + sum(sizes[weight.unit] * heads.count(id(weight.param)) for weight in store.memory.rows.weights)

    def _nbytes_of(self, param: nn.Parameter) -> int:
        """Return the bytes of a weight by rows on this rank's drives."""
        if not isinstance(self._store, UnitStore):
            return 0
        (weight,) = (each for each in self._store.memory.rows.weights if each.param is param)
        return self._on_drive(self._store.units[weight.unit])

    def _on_drive(self, unit: Unit) -> int:
        return sum(self._nbytes(bucket) for bucket in unit.buckets if self._store.tier_of(bucket) == "nvme")

    def _nbytes(self, bucket: FlatBucket) -> int:
        """Return the bytes of this rank's shard in its tier."""
        stored, parts, itemsize = self.opt.offload.stored, open_parts(self.opt), self.opt.precision.param_nbytes
        if stored is None:
            return itemsize * bucket.shard_count
        return stored.nbytes(bucket, parts.geometry, parts.names, itemsize)

    def stats(self) -> dict[str, float]:
        """Wait for started reads, and return counters since the model was streamed.

        passes (forwards), read_nbytes (from the drive), read_s (time with a read in flight), waited_s (of forwards, for
        weights). routed_nbytes, of a mixture of experts: bytes of the experts that tokens were routed to."""
        now, routed = self._swap(), 0 if self._routed is None else self._routed.nbytes
        return {"passes": self.passes, "routed_nbytes": routed} | {name: now[name] - self._begin[name] for name in now}

    def _swap(self) -> dict[str, float]:
        if isinstance(self._store, UnitStore):
            self._store.gather.synchronize()
        stats = self.opt.stats()
        names = {"read_nbytes": "swap_read_nbytes", "read_s": "swap_read_s"}
        waited = {"waited_s": open_parts(self.opt).store.waited_s}
        return {name: stats[other] for name, other in names.items()} | waited

    def memory(self) -> dict[str, dict[str, int]]:
        """Return the bytes of this rank by tier and purpose, as ``ZeroOptimizer.memory``; quantised weights as kept."""
        found, store = self.opt.memory(), self._store
        if self.opt.offload.stored is not None:
            for bucket in open_parts(self.opt).geometry.every:
                whole = bucket.shard_count * self.opt.precision.param_nbytes
                found[store.tier_of(bucket)]["parameters"] += self._nbytes(bucket) - whole
        return found

    def close(self) -> None:
        """End streaming, and free the drive's space. The model keeps whole weights if they fit into memory: see
        ``ZeroOptimizer.close``."""
        self._hook.remove()
        if self._routed is not None:
            self._routed.close()
        self.opt.close()


class _AfterForward(Hook):
    """The forward hook by which ``streamed`` finds a model's Streamed."""

    def __init__(self, stream: Streamed) -> None:
        super().__init__(lambda module, args, output: stream.after_forward())
        self.stream = stream


def streamed(model: nn.Module) -> Streamed:
    """Return the Streamed of a model of ``stream``. Raises: ValueError for any other model, and after ``close()``."""
    for hook in model._forward_hooks.values():
        if isinstance(hook, _AfterForward):
            return hook.stream
    raise ValueError(f"{type(model).__name__} did not come from zcomm.inference.stream(), or its stream is closed")


def stream(
    model: nn.Module | StrPath,
    weights: Tier = "nvme",
    quantize: Literal["int8", "int4"] | None = None,
    *,
    kv: str = "device",
    memory: int | str | MemoryLimit | None = None,
    folder: StrPath | Sequence[StrPath] | None = None,
    device: torch.device | str | None = None,
    comm: Communicator | None = None,
) -> nn.Module:
    """Make a model generate with weights on a drive or in host memory, a few units of them at a time in use.

    model: a module, or a folder of transformers' ``save_pretrained`` with a causal language model. From a folder, or
    built inside of ``zcomm.zero.Init()``, it is never whole in memory. Its floating parameters have one dtype: fp32,
    bf16 or fp16. They no longer require gradients, and the model is in eval mode.
    weights: "nvme", or "cpu": in host memory, one copy for all ranks of a host. The root (embeddings, head, last norm)
    is resident, unless ``memory`` forbids it.
    quantize: None: weights keep their bits. "int8", "int4": matrices are kept in 8 or 4 bits, rounded to nearest, with
    a scale for each 256 elements. Embeddings and the head have 8. They are decoded as they are gathered, so a forward
    has the numbers of a resident model with decoded weights. With several ranks blocks also end at a rank's part.
    kv: place of ``generate``'s key/value cache: "device", or "cpu", for a model on a device: layers take turns there.
    memory: the most memory that a rank's process may hold, such as "4GiB". ``MemoryLimit(..., activations=)`` keeps
    room for the cache, and spends the rest on resident weights. None: no limit.
    folder: directory on the drive for a swap file of the weights' size, or one for each drive; None: ``model``, if that
    is a folder.
    device: that computes; None: the parameters' device.
    Collective if the job has several ranks. They then forward in step: ``generate(synced_gpus=True)`` does so.
    Returns: the model; ``streamed(model)`` has its counters.
    Raises: ValueError naming the argument; OSError (ENOSPC, EACCES) from ``folder``.
    """
    if weights not in ("cpu", "nvme"):
        raise ValueError(f"stream: weights={weights!r}; use 'cpu' or 'nvme'")
    if quantize not in (None, "int8", "int4"):
        raise ValueError(f"stream: quantize={quantize!r}; use None, 'int8' or 'int4'")
    if kv not in ("device", "cpu"):
        raise ValueError(f"stream: kv={kv!r}; use 'device' or 'cpu'")
    if not isinstance(model, nn.Module):
        path = Path(os.fspath(model))
        folder, model = path if folder is None else folder, load_folder(path)
    if weights == "nvme" and folder is None:
        raise ValueError("stream: weights='nvme' of a module needs folder=, a directory on the drive")
    if optimizers_of(model.parameters()):
        raise ValueError(
            f"stream: {type(model).__name__} has an open ZeroOptimizer, or is streamed already: close that first, or "
            "call generate() inside of zcomm.zero.GatheredParameters(model)"
        )
    dtype = _dtype_of(model)
    _place_cache(model, kv)
    model.eval().requires_grad_(False)
    stored = None if quantize is None else Quantized(quantize, finer_names(model))
    experts = routed_modules(model, comm)
    opt = ZeroOptimizer(
        model,
        None,
        stage=3,
        offload=Offload(params=weights, stored=stored),
        share_parameters=stored is None,
        nvme_path=folder if weights == "nvme" else None,
        precision=dtype,
        prefetch=_units_ahead(model, dtype.itemsize),
        units=Units(indexed=experts),
        memory=memory,
        device=device,
        comm=comm,
    )
    Streamed(model, opt, experts)
    return model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of all floating parameters. Raises: ValueError naming some of another one."""
    names: dict[torch.dtype, list[str]] = {}
    for name, param in model.named_parameters():
        if param.is_floating_point():
            names.setdefault(param.dtype, []).append(name)
    if not names:
        raise ValueError(f"stream: {type(model).__name__} has no floating-point parameters")
    if len(names) > 1 or next(iter(names)) not in _DTYPES:
        found = "; ".join(f"{dtype}: {format_names(some)}" for dtype, some in names.items())
        raise ValueError(f"stream: parameters need one dtype, fp32, bf16 or fp16, but have {found}: convert the model")
    return next(iter(names))


def _units_ahead(model: nn.Module, itemsize: int) -> int:
    """Choose how many units are read ahead: one, or several small ones."""
    sizes = [sum(param.numel() for param in block.parameters()) for _, block in repeated_blocks(model)]
    largest = itemsize * max(sizes, default=_AHEAD_NBYTES)
    return max(1, min(_MOST_AHEAD, _AHEAD_NBYTES // max(largest, 1)))


def _place_cache(model: nn.Module, kv: str) -> None:
    """Place ``generate``'s cache. Raises: ValueError for a model that is not of transformers."""
    if kv == "device":
        return
    config: Any = getattr(model, "generation_config", None)
    if config is None:
        raise ValueError("stream: kv='cpu' is for models of transformers, with a generation_config; leave it out")
    if next(model.parameters()).device.type != "cpu":
        config.cache_implementation = "offloaded"
