"""ZeroOptimizer: a torch optimizer whose state, gradients and parameters are sharded over ranks and tiers.

It only composes: Geometry (where things lie), GradientReducer (backward), ParameterStore (weights), ShardState (m, v,
remainder), GradientNorm (clipping), Sweep (a step). The stage decides which of them is replicated and which is sharded;
no stage has arithmetic of its own, which is what makes their bits equal (decision D3).
Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init
from zcomm.memory.swap_file import StrPath
from zcomm.zero import checkpoint, same_on_ranks
from zcomm.zero.assemble import Parts, build_parts
from zcomm.zero.checkpoint import state_dict as torch_state
from zcomm.zero.gradients.loss_scale import LossScale, LossScaler
from zcomm.zero.gradients.nonfinite import NonFinite, report
from zcomm.zero.gradients.norm import clip_factor
from zcomm.zero.memory import Memory, memory_of, stats_of, warn_of_integers
from zcomm.zero.options import Offload, UnitLike, Units, as_offload, as_precision, as_units, check_stage
from zcomm.zero.param_groups import ParamGroups
from zcomm.zero.poison import Breakage
from zcomm.zero.registry import opened, taken_params
from zcomm.zero.rules.resolve import OptimizerLike, choose_rule, frozen_in, torch_groups
from zcomm.zero.step import NoGradientsError, Sweep
from zcomm.zero.validate import check_accumulation, check_free, check_kinds, check_numbers, check_skip, log_unsaved


def _factor_of(optimizer: weakref.ref[ZeroOptimizer]) -> float:
    found = optimizer()
    return 1.0 if found is None else found.gradient_factor


ParamsOrModel = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer with ZeRO stage 0 to 3 and offload.

    model: a module, or its parameters or param groups (stages 0 to 2).
    optimizer: "adamw", "adam", "lion", "sgd", "adagrad" (fused), or a class of ``torch.optim`` or an instance. An
    instance keeps its param groups: both have the same list (until ``close()``, without frozen parameters), so what is
    set on either, by a schedule too, counts in the next step. Its own ``step()`` and ``state_dict()`` raise until then.
    Adam, AdamW, SGD and Adagrad become the fused ones; others run as they are on fp32 shards where they are elementwise
    (RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop).
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

    Gradients are averaged over the ranks and the ``grad_accum`` micro-steps; do not divide the loss. Call ``step()``
    and ``zero_grad()`` after every micro-step: they act on every ``grad_accum``-th (``boundary`` overrides the count).
    A step whose gradients are not finite is skipped and counted in ``skipped_steps`` in fp16 (where the scale shrinks)
    and with ``skip_nonfinite``; in every precision ``nonfinite`` names the first such gradient. All ranks start with
    rank 0's weights. After ``backward()`` ``param.grad`` is a stand-in for what the optimizer's accumulators hold (a
    ``GradStandIn``): programs change it in place, measure, drop or replace it as in torch.

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
        self._grad_accum = grad_accum
        self.boundary: bool | None = None
        self.averages = True  # over micro-steps; False: their losses are divided already
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.overflow = False  # whether the last step was skipped; DeepSpeed's name, Accelerate reads it
        self.step_count = 0  # optimizer steps, skipped ones included
        self.nonfinite: NonFinite | None = None
        if loss_scale is not None and precision != "fp16":
            raise ValueError(f"loss_scale={loss_scale} needs precision='fp16', but precision={precision!r}")
        self.scaler = LossScaler(loss_scale or LossScale()) if precision == "fp16" else None
        self._scaled_passes = 0
        self._pass_scale = self.loss_scale
        if isinstance(model, Iterator):
            model = list(model)
        groups = torch_groups(model, optimizer)
        self._frozen = frozen_in(model, optimizer)
        self.rule, groups = choose_rule(optimizer, optimizer_args, groups)
        super().__init__(groups, self.rule.defaults)
        self.state = _NoState()
        self._micro_step = 0
        self._updates = 0  # calls of step() that used gradients; no load changes it
        self._backwards = 0  # backward passes before the last step() or zero_grad()
        self._stepped = True
        self._step_s = 0.0
        job, module = comm or init(), model if isinstance(model, nn.Module) else None
        taken = taken_params()
        check_free(self.param_groups, taken)
        same_on_ranks.check(
            self, job, module, units, bucket_mb=bucket_mb, prefetch=prefetch, share_parameters=share_parameters
        )
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
        warn_of_integers(module, stage, job.rank)
        self.grad_accum = grad_accum
        of_this = weakref.ref(self)
        self._parts.reducer.values.factor = lambda: _factor_of(of_this)
        self._sweep = Sweep(self._parts, self.rule, whole=stage == 0, groups=len(self.param_groups))
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._groups = ParamGroups(self, self.optimizer)
        opened(self)

    @property
    def loss_scale(self) -> float:
        """What ``backward()`` multiplies the loss by; 1 unless precision is fp16."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def grad_accum(self) -> int:
        """Micro-steps per step. It can be set between steps."""
        return self._grad_accum

    @grad_accum.setter
    def grad_accum(self, count: int) -> None:
        check_accumulation(count)
        if self._parts is not None and self._micro_step:
            raise RuntimeError(
                f"grad_accum={count}: micro-step {self._micro_step} of {self._grad_accum} is over: set it between steps"
            )
        self._grad_accum = count
        if self._parts is not None:
            self._parts.reducer.passes = count

    @property
    def gradient_factor(self) -> float:
        """Factor of accumulated gradients over their mean: micro-steps (if not divided yet) times loss scale."""
        scale = self._pass_scale if self.scaler is not None else 1.0
        return (self.grad_accum if self.averages else 1) * scale

    @property
    def _live(self) -> Parts:
        """``_settled``, with the model's parameters attached: what the program has put into them is the weights now."""
        parts = self._settled
        parts.attachment.restore()
        return parts

    @property
    def _settled(self) -> Parts:
        """The parts, none of which a step behind the forward uses any more."""
        parts = self._open_parts
        if parts.behind is not None:
            with self._breakage.watch():
                parts.behind.join()
        return parts

    @contextlib.contextmanager
    def _looking(self) -> Iterator[Parts]:
        """``_live`` for a while: afterwards parameters have the data again that the program has put into them."""
        parts = self._settled
        with parts.attachment.shown():
            yield parts

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
        self._check_passes()
        self._micro_step += 1
        self._stepped = self.boundary if self.boundary is not None else self._micro_step >= self.grad_accum
        if not self._stepped:
            self.join()  # parameters that the program has replaced: before the next pass adds to their gradients
        else:
            self._micro_step = 0
            start = time.perf_counter()
            with torch.no_grad(), contextlib.suppress(NoGradientsError):
                self._update()
            self._open_parts.reducer.step_has_used()
            self._step_s += time.perf_counter() - start
        self._groups.stepped()
        return loss

    def _check_frozen(self) -> None:
        """Raises: RuntimeError for a parameter that was frozen at construction, and has a gradient now."""
        for param in self._frozen:
            if param.requires_grad and param.grad is not None:
                modules = self._open_parts.model.named_parameters() if self._open_parts.model is not None else ()
                name = next((name for name, other in modules if other is param), f"of shape {tuple(param.shape)}")
                raise RuntimeError(
                    f"step(): parameter {name} requires a gradient now, but was frozen when ZeroOptimizer was built: "
                    "it has no place in its state: build ZeroOptimizer while it requires one (requires_grad_(False) "
                    "afterwards freezes it until it is wanted), or save, close() and build it again"
                )

    def _check_passes(self) -> None:
        """Raises: RuntimeError for a program that calls ``step`` once for several micro-steps."""
        passes = self._open_parts.reducer.backwards
        since, self._backwards = passes - self._backwards, passes
        if since > 1 and self.grad_accum > 1 and self.boundary is None:
            self._backwards -= since  # until zero_grad()
            raise RuntimeError(
                f"step() after {since} backward passes with grad_accum={self.grad_accum}: either call step() and "
                f"zero_grad() after each backward pass (they act on every {self.grad_accum}th), or give grad_accum=1, "
                f"divide the loss by {self.grad_accum} and call them after the last one. (Of several losses in a "
                "micro-step: add them up, or set opt.boundary to whether this call shall update.)"
            )

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """``loss.backward()``, with the loss scaled where precision is fp16."""
        self._scaled_passes += 1
        if self.scaler is not None:
            self._pass_scale = self.scaler.scale  # a step changes it, but not the gradients that are kept
            loss = loss.float() * self.scaler.scale
        reducer = self._open_parts.reducer
        if loss.grad_fn is not None:
            loss.register_hook(lambda grad: reducer.arm())
        loss.backward(retain_graph=retain_graph)

    def _update(self) -> None:
        parts = self._live
        if parts.reducer.broken:
            raise RuntimeError("step(): the last backward pass ended with an error; call zero_grad() and run it again")
        self._check_frozen()
        if not parts.reducer.ask():
            return  # no gradients: as in torch, nothing to do
        if self.scaler is not None and parts.reducer.scaled_passes > self._scaled_passes:
            raise RuntimeError("precision='fp16' needs opt.backward(loss) instead of loss.backward()")
        self._groups.check(self)
        parts.reducer.say_unused()
        scale = 1.0 / self.gradient_factor
        decides = self.skip_nonfinite or self.clip_norm is not None or parts.behind is not None
        early = None if decides else self._sweep.run_early(self.param_groups, scale, self._breakage.watch)
        total = self._sweep.norm() if early is None else early
        self.step_count += 1
        self._updates += 1
        self.grad_norm = norm = total / self.gradient_factor
        finite = math.isfinite(total)
        if not finite:
            report(self, parts)
        if self.scaler is not None:
            self.scaler.update(overflow=not finite)
        self.overflow = self.skip_nonfinite and not finite
        if self.overflow:
            self.skipped_steps += 1
            return
        if self.clip_norm is not None:
            scale *= clip_factor(norm, self.clip_norm)
        with self._breakage.watch():
            if parts.behind is not None:
                parts.behind.start(self._sweep.prepared(self.param_groups, scale))
                parts.store.count_change()
                return
            if early is None:
                self._sweep.run(self.param_groups, scale)
            parts.store.arrive()
            parts.store.count_change()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing between the micro-steps of one accumulation.

        set_to_none: False makes them zero, as torch does: a step without another pass then goes on by momentum.
        """
        reducer, hooks = self._open_parts.reducer, self._open_parts.hooks
        if hooks is not None:
            hooks.clear_interrupted()
        self._backwards = reducer.backwards
        if reducer.broken:
            self._micro_step = 0  # its gradients are lost: the accumulation begins again
        if self._stepped or self._micro_step == 0:
            self._scaled_passes = 0
            reducer.zero(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up their gradients on this rank, in fp32; the next one outside, or the step after
        it, reduces the sum. Fewer bytes move, but the bits are those of another order of summing. Blocks may lie in
        each other. Memory: 4 bytes per element until then."""
        reducer = self._open_parts.reducer
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            reducer.sync = before

    # --- looking ----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Bytes of this rank by tier and purpose; what ranks of a host share counts as nbytes / local_world_size."""
        return memory_of(self._settled)

    def stats(self) -> dict[str, float]:
        """Cumulative seconds that the main thread waited and that it looked for edited weights, and what the swap file
        moved."""
        return stats_of(self._settled, self._sweep.waited_s, self._step_s)

    def allocation_count(self) -> int:
        """Allocations that the core ever made for this optimizer; constant after the second step."""
        return self._settled.allocation_count()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """What ``model.state_dict()`` would be if all were whole here: parameters under each of their names (tied ones
        share memory), frozen ones, this rank's buffers. Copied to the CPU. Collective in stage 3."""
        with self._looking() as parts:
            return torch_state.full_state_dict(parts)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with whole tensors on every rank (``save`` keeps no more than one in memory). Collective.

        With 16-bit weights ``master``, fp32, lies beside the optimizer's own arrays.
        """
        self._breakage.check("state_dict()")
        with self._looking():
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
        scheduler: its ``state_dict()`` is saved. client_state: numbers, strings, tensors, numpy arrays and scalars, and
        lists, tuples, dicts and argparse Namespaces of them; rank 0's.
        wait: False copies this rank's shards, those in RAM to RAM and those on a drive on that drive, and puts together
        and writes the tensors while training goes on; the result's ``wait()`` tells how it went. The next save, load
        and close wait for it.
        Gradients are not saved: amid an accumulation this is logged once. Collective; between hosts all ranks need to
        see the same folder.
        Raises, on every rank: ValueError naming the way to a value that cannot be kept, before anything is written;
        OSError (naming the rank that failed; EBUSY for a mount point, or where another save is writing).
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
        root: str = "client_state",
    ) -> checkpoint.SaveTask:
        """then: what rank 0 does once the folder is in its place. lean: without frozen parameters. root: how messages
        write the way to ``client_state``."""
        self._breakage.check("save()")
        log_unsaved(self._open_parts.reducer.waiting_passes, self._micro_step, self.grad_accum)
        self._end_saving()
        final = Path(directory).absolute()
        with self._looking():
            self._saving = checkpoint.save(self, final, scheduler, client_state, wait, then, lean, root)
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
        is wrong; ValueError listing names and shapes of another model or optimizer, or naming a field of a manifest.
        """
        return self._load(directory, scheduler=scheduler, optimizer=optimizer, random=random, strict=strict)

    def _load(
        self,
        directory: StrPath,
        *,
        scheduler: Any,
        optimizer: bool,
        random: bool,
        strict: bool,
        inspect: Callable[[Any], None] = lambda client_state: None,
    ) -> Any:
        """inspect: raises where the client state is not the caller's, before anything has changed."""
        self._end_saving()
        if not optimizer:
            self._breakage.check("load(optimizer=False)")
        client_state = checkpoint.load(self, Path(directory).absolute(), scheduler, optimizer, random, strict, inspect)
        self._micro_step = self._scaled_passes = 0  # gradients of an accumulation that had begun are gone
        return client_state

    # --- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, free all memory and swap files. Idempotent; not collective.

        The model keeps its weights in memory of its own. In stage 3 by units it does so where this rank has all of them
        (a world of one) and host memory has room; otherwise its parameters raise when their values are used, until
        ``load_state_dict`` gives them new ones: call ``save()`` or ``full_state_dict()`` first.
        """
        self._close(keep_weights=True)

    def _close(self, keep_weights: bool) -> None:
        """keep_weights: False where the program ends."""
        if self._parts is not None:
            try:
                self._end_saving()
            except Exception as error:
                logging.getLogger("zcomm").warning("a checkpoint could not be finished: %s", error)
            self._parts.store.keeps_weights = keep_weights
            self._parts.close()
            self._parts = None
            self._groups.end()
            self._breakage.mended()  # lets go of the error's frames

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied: it has shards, communicators and hooks; opt.state_dict() and opt.save() "
            "give its state, which another one loads"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ZeroOptimizer cannot be pickled or copied: use opt.save(), or opt.state_dict()")

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None:
            self.close()


_READ = "zcomm.zero.full_optim_state(param, key)"
_SET = "zcomm.zero.set_full_optim_state(param, key, value)"


class _NoState(defaultdict[Any, Any]):
    """An empty ``ZeroOptimizer.state``. Raises: RuntimeError naming the call to use, for an entry, a change or
    ``clear``."""

    def __missing__(self, key: object) -> NoReturn:
        raise RuntimeError(
            f"optimizer.state is sharded and has no entry here: {_READ} gives an array whole, {_SET} replaces it, "
            "optimizer.state_dict() gives all"
        )

    def __setitem__(self, key: object, value: object) -> NoReturn:
        raise RuntimeError(f"optimizer.state is sharded and takes no entry: {_SET} replaces an array")

    def clear(self) -> NoReturn:
        raise RuntimeError(f"optimizer.state is sharded, clear() would forget nothing: {_SET} replaces an array")
