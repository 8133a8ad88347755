"""ZeroOptimizer: a torch optimizer whose state, gradients and parameters are sharded over ranks and tiers.

It only composes: Geometry (where things lie), GradientReducer (backward), ParameterStore (weights), ShardState (m, v,
remainder), GradientNorm (clipping). The stage decides which of them is replicated and which is sharded; no stage has
arithmetic of its own, which is what makes their bits equal (decision D3).
Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857).
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm._job import init
from zcomm.comm import Communicator
from zcomm.offload import StrPath
from zcomm.zero.build import Parts, build_parts
from zcomm.zero.hyper import named_optimizer, step_params, torch_groups
from zcomm.zero.memory import Memory, empty_memory
from zcomm.zero.options import Offload, as_offload, as_precision, check_stage
from zcomm.zero.state import ShardStep

_open: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()

ParamsOrModel = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """Adam / AdamW with ZeRO stage 0 to 3 and offload.

    model: a module, or its parameters or param groups (stages 0 to 2).
    optimizer: "adamw", "adam", or a ``torch.optim.Adam`` / ``AdamW`` class or instance (whose groups are taken over).
    stage: 0 replicated, 1 sharded optimizer state, 2 and gradients, 3 and parameters.
    offload: None, "cpu", "nvme" or ``zcomm.Offload``. nvme_path: directory on the drive, needed by "nvme"; a list
    stripes the state over several drives, one directory on each.
    precision: "fp32", or "bf16" (parameters and gradients in bf16, exact fp32 master, fp32 accumulation).
    clip_norm: clip the global gradient norm to this. grad_accum: micro-steps per step.
    bucket_mb: MiB of gradients that travel together. prefetch: units gathered ahead (stage 3 by units).
    overlap: reduce while backward runs. share_parameters: one copy of the parameters for the CPU ranks of a host,
    where all are on one host (backend "shm"); otherwise a copy on each rank.
    optimizer_args: lr, betas, eps, weight_decay, maximize.

    Gradients are averaged over the ranks and over the ``grad_accum`` micro-steps; nobody else divides. Call ``step()``
    and ``zero_grad()`` after every micro-step: they act on every ``grad_accum``-th (``boundary`` overrides the count).
    Rank 0's weights are everybody's first weights. After ``backward()`` the gradients are in the optimizer's own
    accumulators, and ``param.grad`` is None.

    Raises: ValueError naming the argument; OSError (ENOSPC, EACCES) from the swap directory, at construction.
    """

    def __init__(
        self,
        model: ParamsOrModel,
        optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer = "adamw",
        *,
        stage: int = 2,
        offload: str | Offload | None = None,
        nvme_path: StrPath | Sequence[StrPath] | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        grad_accum: int = 1,
        bucket_mb: float = 25.0,
        prefetch: int = 1,
        overlap: bool = True,
        share_parameters: bool = True,
        comm: Communicator | None = None,
        **optimizer_args: Any,
    ) -> None:
        self._parts: Parts | None = None
        self.stage = check_stage(stage)
        self.offload = as_offload(offload, stage)
        self.precision = as_precision(precision)
        _check_numbers(clip_norm, grad_accum, bucket_mb, prefetch)
        if self.offload.uses_nvme and nvme_path is None:
            raise ValueError("offload='nvme' needs nvme_path, a directory on the drive to swap to")
        if stage == 3 and not isinstance(model, nn.Module):
            raise ValueError("stage=3 needs the model itself (it hooks its modules), not a list of parameters")
        self.clip_norm = clip_norm
        self.grad_accum = grad_accum
        self.boundary: bool | None = None
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self._adamw, defaults = named_optimizer(optimizer, optimizer_args)
        super().__init__(torch_groups(model, optimizer), defaults)
        self._micro_step = 0
        self._stepped = True
        self._step_s = 0.0
        self._extra_wait_s = 0.0
        self._parts = build_parts(
            model if isinstance(model, nn.Module) else None,
            self.param_groups,
            comm or init(),
            stage=stage,
            offload=self.offload,
            precision=self.precision,
            nvme_path=nvme_path,
            bucket_nbytes=int(bucket_mb * 2**20),
            prefetch=prefetch,
            overlap=overlap,
            share_parameters=share_parameters,
        )
        _open.add(self)

    @property
    def _live(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("this ZeroOptimizer is closed")
        return self._parts

    # --- training ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, on every ``grad_accum``-th call. Collective then.

        closure: re-evaluates the model and returns the loss (with gradients), as in torch.
        Raises: PeerLost, TimeoutError, CollectiveMismatch from gradients in flight; OSError from swap files.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._micro_step += 1
        self._stepped = self.boundary if self.boundary is not None else self._micro_step >= self.grad_accum
        if self._stepped:
            self._micro_step = 0
            start = time.perf_counter()
            with torch.no_grad():
                self._update()
            self._step_s += time.perf_counter() - start
        return loss

    def _update(self) -> None:
        parts = self._live
        if parts.reducer.reached == 0:
            return  # no gradients: as in torch, nothing to do
        parts.reducer.finish()
        start = time.perf_counter()
        # Also the point after which nobody reads the old weights any more.
        norm = parts.norm(parts.reducer.shard_view(bucket) for bucket in parts.geometry.buckets) / self.grad_accum
        self._extra_wait_s += time.perf_counter() - start
        self.grad_norm = norm
        if parts.reducer.replicated and self.stage == 0:
            parts.reducer.gather()
        scale = 1.0 / self.grad_accum
        if self.clip_norm is not None:
            scale *= min(1.0, self.clip_norm / (norm + 1e-6))
        hyper = []
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            hyper.append(step_params(group, self._adamw, scale))
        parts.state.step(self._shard_steps(parts, hyper))
        start = time.perf_counter()
        parts.store.publish()
        self._extra_wait_s += time.perf_counter() - start

    def _shard_steps(self, parts: Parts, hyper: list[_core.AdamParams]) -> Iterator[ShardStep]:
        for bucket, weight in parts.store.sweep():
            grad = parts.reducer.bucket_view(bucket) if self.stage == 0 else parts.reducer.shard_view(bucket)
            runs = [(begin, end, hyper[group]) for begin, end, group in parts.runs[bucket.index]]
            yield ShardStep(bucket.index, weight, grad, runs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing between the micro-steps of one accumulation."""
        if self._stepped or self._micro_step == 0:
            self._live.reducer.zero()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave their gradients in ``param.grad`` (local sums); the next one outside reduces."""
        reducer = self._live.reducer
        reducer.sync = False
        try:
            yield
        finally:
            reducer.sync = True

    # --- looking ----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of this rank by tier and purpose; what ranks of a host share counts as nbytes / local_world_size."""
        parts = self._live
        memory = empty_memory()
        memory[parts.store.tier]["parameters"] += parts.store.param_nbytes
        memory["device"]["gradients"] += parts.reducer.accumulators.nbytes
        for tier, nbytes in parts.state.nbytes_by_tier.items():
            memory[tier]["optimizer"] += nbytes
        memory["device"]["slots"] += parts.reducer.slot_nbytes + parts.store.slot_nbytes
        memory["cpu"]["slots"] += parts.state.window_nbytes + parts.store.window_nbytes
        return memory

    def stats(self) -> dict[str, float]:
        """Cumulative seconds that the main thread waited, and what the swap file moved."""
        parts = self._live
        swap = parts.swap.stats() if parts.swap is not None else {}
        return {
            "comm_s": parts.reducer.waited_s + self._extra_wait_s,
            "swap_s": parts.state.waited_s + parts.store.waited_s,
            "step_s": self._step_s,
            "swap_read_nbytes": swap.get("read_nbytes", 0),
            "swap_written_nbytes": swap.get("written_nbytes", 0),
            "swap_read_s": swap.get("read_s", 0.0),
            "swap_write_s": swap.get("write_s", 0.0),
        }

    def allocation_count(self) -> int:
        """Allocations that the core ever made for this optimizer; constant after the second step."""
        return self._live.allocation_count()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, as copies. Collective in stage 3."""
        parts = self._live
        return {name: parts.store.full(index) for index, name in enumerate(parts.names)}

    def state_dict(self) -> dict[str, Any]:
        """Not available yet: torch's own would leave out the sharded state without a word."""
        raise NotImplementedError(
            "ZeroOptimizer.state_dict() is not available yet; full_state_dict() gives the whole parameters by name"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not available yet, as ``state_dict``."""
        raise NotImplementedError("ZeroOptimizer.load_state_dict() is not available yet")

    # --- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, free all memory and swap files. Idempotent; not collective.

        The model keeps its weights in memory of its own, except in stage 3 by units, where they are empty afterwards
        (take ``full_state_dict()`` first).
        """
        if self._parts is not None:
            self._parts.close()
            self._parts = None

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None:
            self.close()


def _check_numbers(clip_norm: float | None, grad_accum: int, bucket_mb: float, prefetch: int) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm} must be more than 0 (None: no clipping)")
    if grad_accum < 1:
        raise ValueError(f"grad_accum={grad_accum} must be at least 1")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb={bucket_mb} must be more than 0 MiB")
    if prefetch < 0:
        raise ValueError(f"prefetch={prefetch} must be at least 0")


@atexit.register
def _close_all() -> None:
    """A program that ends, or fails, without close() leaves no swap file."""
    for optimizer in list(_open):
        optimizer.close()
