"""ZeroOptimizer: a torch optimizer whose state, gradients and parameters are sharded over ranks and tiers.

It only composes: Geometry (where things lie), GradientReducer (backward), ParameterStore (weights), ShardState (m, v,
remainder), GradientNorm (clipping), Sweep (a step). The stage decides which of them is replicated and which is sharded;
no stage has arithmetic of its own, which is what makes their bits equal (decision D3).
Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm._job import init
from zcomm.comm import Communicator
from zcomm.offload import StrPath
from zcomm.zero import alike, checkpoint, integers
from zcomm.zero import state_dict as torch_state
from zcomm.zero.breakage import Breakage
from zcomm.zero.build import Parts, build_parts
from zcomm.zero.checks import check_free, check_kinds, check_numbers, check_saving, check_skip
from zcomm.zero.hyper import OptimizerLike, choose_rule, torch_groups
from zcomm.zero.loss_scale import LossScale, LossScaler
from zcomm.zero.memory import Memory, memory_of, stats_of
from zcomm.zero.nonfinite import NonFinite, report
from zcomm.zero.norm import clip_factor
from zcomm.zero.opened import opened, taken_params
from zcomm.zero.options import Offload, as_offload, as_precision, check_stage
from zcomm.zero.sweep import Sweep
from zcomm.zero.unit_options import UnitLike, Units, as_units

ParamsOrModel = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer with ZeRO stage 0 to 3 and offload.

    model: a module, or its parameters or param groups (stages 0 to 2).
    optimizer: "adamw", "adam", "lion", "sgd", "adagrad" (fused), or a class of ``torch.optim`` or an instance, whose
    groups and options are taken over. Adam, AdamW, SGD and Adagrad become the fused ones; others run as they are on
    fp32 shards where they are elementwise (RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop).
    stage: 0 replicated, 1 and 2 sharded optimizer state and gradients, 3 and parameters.
    offload: None, "cpu", "nvme" or ``zcomm.Offload``. nvme_path: directory on the drive, needed by "nvme"; a list
    stripes the state over several drives, one directory on each.
    precision: "fp32"; "bf16" or "fp16" (parameters and gradients in it, exact fp32 master, fp32 accumulation). fp16
    needs ``opt.backward(loss)``, which scales the loss. loss_scale: a ``LossScale`` (dynamic), or a number.
    clip_norm: clip the global gradient norm to this; one that is not finite makes all weights NaN, unless skipped.
    grad_accum: micro-steps per step.
    bucket_mb: MiB of gradients that travel together. prefetch: units gathered ahead (stage 3 by units).
    overlap: reduce while backward runs. share_parameters: one copy of the parameters for the CPU ranks of a host,
    where all are on one host (backend "shm"); otherwise a copy on each rank.
    communication_dtype: "fp32", "bf16" or "fp16": of gradients on their way; None: that of training. Sums are fp32.
    buffer_dtype: the same, of floating buffers; None: as they are (statistics of norms with weights: as the weights).
    skip_nonfinite: skip steps whose gradients are not finite; None: in fp16 only, which always does.
    units: stage 3 by units: a list of its units, or ``zero.Units`` (which also keeps, joins, prefetches by bytes).
    device: where the model trains: a CUDA device, to which parameters on the CPU or without memory (``zero.Init``) come
    unit by unit, or whole where the stage keeps them whole; None: where the parameters are. Where the devices of
    several ranks do not reach each other, shards of stage 3 that would stay there are in host memory.
    optimizer_args: options of a named optimizer or class, as torch's (lr, betas, momentum, ...).

    Gradients are averaged over the ranks and over the ``grad_accum`` micro-steps; nobody else divides. Call ``step()``
    and ``zero_grad()`` after every micro-step: they act on every ``grad_accum``-th (``boundary`` overrides the count).
    A step whose gradients are not finite is skipped and counted in ``skipped_steps`` in fp16 (where the scale shrinks)
    and with ``skip_nonfinite``; in every precision ``nonfinite`` names the first such gradient. Rank 0's weights are
    everybody's first weights. After ``backward()`` ``param.grad`` is None: the optimizer's accumulators have it.

    Raises: ValueError naming the argument; OSError (ENOSPC, EACCES) from the swap directory, at construction.
    """

    def __init__(
        self,
        model: ParamsOrModel,
        optimizer: OptimizerLike = "adamw",
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
        loss_scale: LossScale | float | None = None,
        communication_dtype: str | None = None,
        buffer_dtype: str | None = None,
        skip_nonfinite: bool | None = None,
        units: Units | Sequence[UnitLike] | None = None,
        device: torch.device | str | None = None,
        **optimizer_args: Any,
    ) -> None:
        self._parts: Parts | None = None
        self._saving: checkpoint.SaveTask | None = None
        self._breakage = Breakage()
        self.stage = check_stage(stage)
        self.offload = as_offload(offload, stage)
        self.precision = as_precision(precision, communication_dtype, buffer_dtype)
        self.skip_nonfinite = check_skip(skip_nonfinite, precision)
        check_numbers(clip_norm, grad_accum, bucket_mb, prefetch)
        check_kinds(comm, overlap, share_parameters, nvme_path)
        units = as_units(units)
        if stage == 3 and not isinstance(model, nn.Module):
            raise ValueError("stage=3 needs the model itself (it hooks its modules), not a list of parameters")
        self.clip_norm = clip_norm
        self.grad_accum = grad_accum
        self.boundary: bool | None = None
        self.averages = True  # over micro-steps; False: their losses are divided already
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.step_count = 0  # optimizer steps, skipped ones included
        self.nonfinite: NonFinite | None = None
        if loss_scale is not None and precision != "fp16":
            raise ValueError(f"loss_scale={loss_scale} needs precision='fp16', but precision={precision!r}")
        self.scaler = LossScaler(loss_scale or LossScale()) if precision == "fp16" else None
        self._scaled_passes = 0
        self.rule, groups = choose_rule(optimizer, optimizer_args, torch_groups(model, optimizer))
        super().__init__(groups, self.rule.defaults)
        self._micro_step = 0
        self._stepped = True
        self._step_s = 0.0
        job, module = comm or init(), model if isinstance(model, nn.Module) else None
        taken = taken_params()
        check_free(self.param_groups, taken)
        alike.check(self, job, module, units, bucket_mb=bucket_mb, prefetch=prefetch, share_parameters=share_parameters)
        self._parts = build_parts(
            module,
            self.param_groups,
            job,
            self.rule,
            stage=stage,
            offload=self.offload,
            precision=self.precision,
            nvme_path=nvme_path,
            bucket_nbytes=int(bucket_mb * 2**20),
            prefetch=prefetch,
            overlap=overlap,
            share_parameters=share_parameters,
            taken=taken,
            units=units,
            device=device,
        )
        integers.say(module, stage, job.rank)
        self._parts.reducer.passes = grad_accum
        self._sweep = Sweep(self._parts, self.rule, whole=stage == 0)
        opened(self)

    @property
    def loss_scale(self) -> float:
        """What ``backward()`` multiplies the loss by; 1 unless precision is fp16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def gradient_factor(self) -> float:
        """What the accumulated gradients are of their mean: micro-steps (where nobody has divided) times loss scale."""
        return (self.grad_accum if self.averages else 1) * self.loss_scale

    @property
    def _live(self) -> Parts:
        """The parts, none of which a step behind the forward uses any more."""
        parts = self._open_parts
        if parts.behind is not None:
            with self._breakage.watch():
                parts.behind.join()
        return parts

    @property
    def _open_parts(self) -> Parts:
        if self._parts is None:
            raise RuntimeError("this ZeroOptimizer is closed")
        return self._parts

    def join(self) -> None:
        """Wait for a step that runs behind the forward (``Offload(step_behind_forward=True)``). Raises: its error."""
        _ = self._live

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: afterwards every parameter has its place in the shards."""
        if self._parts is not None:
            raise NotImplementedError("add_param_group() after construction: give all groups to ZeroOptimizer at once")
        super().add_param_group(param_group)

    # --- training ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, on every ``grad_accum``-th call. Collective then.

        closure: re-evaluates the model and returns the loss (with gradients), as in torch.
        Raises: PeerLost, TimeoutError, CollectiveMismatch, CudaError from gradients in flight; OSError from swap files,
        on all ranks. An error or an interrupt amid the update (on a device it begins while gradients are in flight):
        RuntimeError in this, save and state_dict until ``load``.
        """
        self._breakage.check("step()")
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        self._micro_step += 1
        self._stepped = self.boundary if self.boundary is not None else self._micro_step >= self.grad_accum
        if self._stepped:
            self._micro_step = 0
            start = time.perf_counter()
            with torch.no_grad():
                self._update()
            self._open_parts.reducer.step_has_used()
            self._step_s += time.perf_counter() - start
        return loss

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """``loss.backward()``, with the loss scaled where precision is fp16."""
        self._scaled_passes += 1
        if self.scaler is not None:
            loss = loss.float() * self.scaler.scale
        reducer = self._open_parts.reducer
        if loss.grad_fn is not None:
            loss.register_hook(lambda grad: reducer.arm())
        loss.backward(retain_graph=retain_graph)

    def _update(self) -> None:
        parts = self._live
        if parts.reducer.broken:
            raise RuntimeError("step(): the last backward pass ended with an error; call zero_grad() and run it again")
        if parts.reducer.reached == 0:
            if parts.reducer.has_rest:
                raise RuntimeError("step(): all gradients are from no_sync(); the last backward pass must be outside")
            return  # no gradients: as in torch, nothing to do
        if self.scaler is not None and parts.reducer.reached > self._scaled_passes:
            raise RuntimeError("precision='fp16' needs opt.backward(loss) instead of loss.backward()")
        parts.reducer.say_unused()
        scale = 1.0 / self.gradient_factor
        decides = self.skip_nonfinite or self.clip_norm is not None or parts.behind is not None
        early = None if decides else self._sweep.run_early(self.param_groups, scale, self._breakage.watch)
        total = self._sweep.norm() if early is None else early
        self.step_count += 1
        self.grad_norm = norm = total / self.gradient_factor
        finite = math.isfinite(total)
        if not finite:
            report(self, parts)
        if self.scaler is not None:
            self.scaler.update(overflow=not finite)
        if self.skip_nonfinite and not finite:
            self.skipped_steps += 1
            return
        if self.clip_norm is not None:
            scale *= clip_factor(norm, self.clip_norm)
        with self._breakage.watch():
            if parts.behind is not None:
                parts.behind.start(self._sweep.prepared(self.param_groups, scale))
                return
            if early is None:
                self._sweep.run(self.param_groups, scale)
            parts.store.arrive()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing between the micro-steps of one accumulation."""
        reducer = self._open_parts.reducer
        if reducer.broken:
            self._micro_step = 0  # its gradients are lost: the accumulation begins again
        if self._stepped or self._micro_step == 0:
            self._scaled_passes = 0
            reducer.zero()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside leave their gradients in ``param.grad`` (local sums, in the parameters' dtype); the
        next one outside reduces the sum. Fewer bytes move, but the bits are those of another order of summing. Blocks
        may lie in each other."""
        reducer = self._open_parts.reducer
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            reducer.sync = before

    # --- looking ----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of this rank by tier and purpose; what ranks of a host share counts as nbytes / local_world_size."""
        return memory_of(self._live)

    def stats(self) -> dict[str, float]:
        """Cumulative seconds that the main thread waited, and what the swap file moved."""
        return stats_of(self._live, self._sweep.waited_s, self._step_s)

    def allocation_count(self) -> int:
        """Allocations that the core ever made for this optimizer; constant after the second step."""
        return self._live.allocation_count()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """What ``model.state_dict()`` would be if all were whole here: parameters under each of their names (tied ones
        share memory), frozen ones, this rank's buffers. Copied to the CPU. Collective in stage 3."""
        return torch_state.full_state_dict(self._live)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole tensors on every rank (``save`` keeps no more than one in memory). Collective.

        With 16-bit weights ``master``, fp32, lies beside the optimizer's own arrays.
        """
        self._breakage.check("state_dict()")
        return torch_state.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What ``state_dict`` gave, at any world size, stage, tier and precision, or torch's class of the same formula.

        Collective. Without ``master`` in it the weights are the model's: load those first. Raises: ValueError.
        """
        self._breakage.check("load_state_dict()")  # the weights may be the model's, of two steps
        torch_state.load_state_dict(self, state_dict)

    def save(
        self, directory: StrPath, *, scheduler: Any = None, client_state: Any = None, wait: bool = True
    ) -> checkpoint.SaveTask:
        """Save weights, optimizer state, counters, loss scale and random number generators as folder ``directory``.

        The folder appears whole: a run that is killed leaves the last one. One whole tensor at a time is in memory.
        scheduler: its ``state_dict()`` is saved. client_state: plain values (numbers, strings, lists, tuples, dicts).
        wait: False copies this rank's shards, those in RAM to RAM and those on a drive on that drive, and puts together
        and writes the tensors while training goes on; the result's ``wait()`` tells how it went. The next save, load
        and close wait for it.
        Call it between optimizer steps. Collective; between hosts all ranks need to see the same folder.
        Raises: OSError (on every rank, naming the one that failed), ValueError for what is no plain value, RuntimeError
        amid an accumulation.
        """
        return self._save(directory, scheduler, client_state, wait)

    def _save(
        self,
        directory: StrPath,
        scheduler: Any,
        client_state: Any,
        wait: bool,
        then: Callable[[], None] = lambda: None,
        lean: bool = False,
    ) -> checkpoint.SaveTask:
        """then: what rank 0 does once the folder is in its place. lean: without frozen parameters."""
        self._breakage.check("save()")
        check_saving(self._open_parts.reducer.waiting_passes, self._micro_step, self.grad_accum)
        self._end_saving()
        self._saving = checkpoint.save(self, Path(directory).absolute(), scheduler, client_state, wait, then, lean)
        return self._saving

    def _end_saving(self) -> None:
        """Wait for a save in the background. Raises: what went wrong there, if ``wait()`` has not."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.end()

    def load(
        self,
        directory: StrPath,
        *,
        scheduler: Any = None,
        optimizer: bool = True,
        random: bool = True,
        strict: bool = True,
    ) -> Any:
        """Load what ``save`` wrote, at any world size, stage, tier and precision. Returns the client state.

        optimizer: also its state, options and counters, else weights alone. random: also the random number generators,
        where the world size is the same. strict: the model's tensors are exactly those of the checkpoint; otherwise
        frozen parameters and buffers may be there on one side alone. Collective.
        Raises, before anything has changed: FileNotFoundError; OSError (EIO) naming file and tensor of a checksum that
        is wrong; ValueError listing names and shapes of another model or optimizer.
        """
        self._end_saving()
        if not optimizer:
            self._breakage.check("load(optimizer=False)")
        client_state = checkpoint.load(self, Path(directory).absolute(), scheduler, optimizer, random, strict)
        self._micro_step = self._scaled_passes = 0  # gradients of an accumulation that had begun are gone
        return client_state

    # --- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, free all memory and swap files. Idempotent; not collective.

        The model keeps its weights in memory of its own, except in stage 3 by units, where they are empty afterwards
        (take ``full_state_dict()`` first).
        """
        if self._parts is not None:
            try:
                self._end_saving()
            except Exception as error:
                logging.getLogger("zcomm").warning("a checkpoint could not be finished: %s", error)
            self._parts.close()
            self._parts = None
            self._breakage.mended()  # lets go of the error's frames

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None:
            self.close()
