"""ZeroOptimizer: a torch optimizer with state, gradients and parameters sharded over ranks and tiers.

The facade checks arguments and forwards calls. Parts has its components, TrainState its options and counters.
MicroSteps and OptimizerStep run backward passes and steps, checkpoint/ saves and loads. The stage decides which part is
shared and which is sharded; no stage has arithmetic of its own, which makes their bits equal (decision D3).
Source: ZeRO (arXiv:1910.02054), ZeRO-Offload (2101.06840), ZeRO-Infinity (2104.07857).
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import torch
from torch import nn

from zcomm.comm.codec import Compression
from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh import ProcessMesh
from zcomm.memory.swap_file import StrPath
from zcomm.watch import rank as watch
from zcomm.zero import checkpoint, consistency
from zcomm.zero.agree import ErrorHolder
from zcomm.zero.assemble import build_parts
from zcomm.zero.checkpoint import state_dict as torch_state
from zcomm.zero.checkpoint import whole_tensors
from zcomm.zero.checkpoint.state_pieces import StatePiece, keys_of, state_pieces
from zcomm.zero.gradients.transport import SparseParams
from zcomm.zero.gradients.values import NonFinite
from zcomm.zero.groups.compression import as_compression
from zcomm.zero.groups.mesh_comms import comms_of, job_of
from zcomm.zero.layout.sections import NoModel, names_of
from zcomm.zero.loss_scale import LossScale, LossScaler
from zcomm.zero.materialize.init import end_init
from zcomm.zero.memory import probe
from zcomm.zero.memory.limit import Guard, MemoryLimit, NoGuard, as_limit, divided, within
from zcomm.zero.memory.usage import Memory, memory_of, stats_of, warn_of_integers
from zcomm.zero.onebit.replicas import Replicas
from zcomm.zero.options import (
    DTypeLike,
    Offload,
    Precision,
    UnitLike,
    Units,
    as_offload,
    as_precision,
    as_units,
    check_stage,
)
from zcomm.zero.param_groups import ParamGroups
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.registry import open_parts, opened, owned_params, parts_of, refuse_gradients
from zcomm.zero.remedy import with_remedy
from zcomm.zero.rules.counters import StepCounters
from zcomm.zero.rules.resolve import OptimizerLike, check_exchanges, choose_rule, torch_groups
from zcomm.zero.rules.rule import NO_OPTIMIZER, NoRule, Rule
from zcomm.zero.second_owner import check_one_owner
from zcomm.zero.sharded.closed import check_not_lost, check_values
from zcomm.zero.steps.local import LocalStep
from zcomm.zero.steps.micro import MicroSteps
from zcomm.zero.steps.step import OptimizerStep
from zcomm.zero.tensors import whole_model
from zcomm.zero.tensors.sharded_state import ShardedState, refuse
from zcomm.zero.units.store import UnitStore
from zcomm.zero.validate import check_accumulation, check_free, check_kinds, check_max_norm, check_numbers, log_widened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class _Of(Generic[T]):
    """An attribute of ZeroOptimizer that forwards to the same attribute of its TrainState."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, optimizer: None, kind: type) -> _Of[T]: ...
    @overload
    def __get__(self, optimizer: ZeroOptimizer, kind: type) -> T: ...
    def __get__(self, optimizer: ZeroOptimizer | None, kind: type) -> Any:
        return self if optimizer is None else getattr(optimizer._train, self._name)

    def __set__(self, optimizer: ZeroOptimizer, value: T) -> None:
        setattr(optimizer._train, self._name, value)


ParamsOrModel = nn.Module | Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class ZeroOptimizer(torch.optim.Optimizer):
    """An optimizer with ZeRO stage 0 to 3 and offload.

    model: a module, or its parameters or param groups (stages 0 to 2).
    optimizer: "adamw", "adam", "lion", "sgd", "adagrad" (fused), "lamb", "muon", "onebit_adam" (stage 0), or
    torch.optim's class or instance.
    An instance and the ZeroOptimizer share one list of param groups until ``close()``; it has no frozen parameters. A
    change to it, for example by a schedule, takes effect in the next step. Until ``close()`` the instance's ``step()``
    and ``state_dict()`` raise.
    Adam, AdamW, SGD and Adagrad become the fused ones. Other elementwise ones (RMSprop, Adadelta, Adamax, NAdam, RAdam,
    ASGD, Rprop) run as they are on fp32 shards. Muon takes matrices; param groups with ``"use_muon": False`` are
    AdamW's. None: the model is not trained. Its weights are rank 0's, in the precision given, and in stage 3 sharded
    and offloaded; backward passes and steps raise.
    stage: optimizer state and gradients are sharded in all. 0: a copy of the parameters on each rank. 1 and 2: one copy
    for the CPU ranks of a host. 3: sharded, too.
    offload: None, "cpu", "nvme" or ``zcomm.Offload``. nvme_path: directory on the drive, needed by "nvme". A list
    stripes the state over several drives, one directory on each.
    precision: "fp32"; "bf16" or "fp16" (parameters and gradients in it, exact fp32 master, fp32 accumulation), or
    torch's dtype. Or a ``zcomm.Precision``, which has the next four options as well. fp16 needs ``opt.backward(loss)``,
    which scales the loss. loss_scale: a ``LossScale`` (dynamic), or a number.
    clip_norm: clip the global gradient norm to this; one that is not finite makes all weights NaN, unless skipped.
    grad_accum: micro-steps per step.
    bucket_mb: MiB of gradients that travel together. prefetch: units gathered ahead (stage 3 by units).
    overlap: reduce while backward runs. share_parameters: one copy of the parameters for the CPU ranks of a host, if
    all are on one host (backend "shm"). Otherwise a copy on each rank.
    communication_dtype: "fp32", "bf16" or "fp16": of gradients in flight; None: the precision's. Sums are fp32.
    buffer_dtype: the same, of floating buffers; None: as they are (statistics of norms with weights: as the weights).
    skip_nonfinite: skip steps with gradients that are not finite; None: in fp16 only, which always does.
    memory: the most memory that a rank's process may hold, such as "4GiB", or a ``zero.MemoryLimit``. None: the limit
    of ``zcomm run --memory``, or no limit. bucket_mb, prefetch, ``Units(max_bytes=)`` and the tier of gradients are
    chosen to keep it, at most as given; ``opt.units``, ``opt.offload``, ``opt.bucket_mb`` and ``opt.prefetch`` have the
    choice. With a model on a device it is host memory, and all optimizer state must be offloaded, in stage 3 all
    parameters, too.
    units: stage 3 by units: a list of its units, or ``zero.Units`` (which also keeps, joins, prefetches by bytes).
    device: the CUDA device that trains the model; None: the parameters' device. Parameters on the CPU or without memory
    (``zero.Init``) are copied to a CUDA device unit by unit, or whole if the stage keeps them whole. If the devices of
    several ranks do not reach each other, stage 3 keeps shards in host memory that would stay on a device.
    mesh: a ``ProcessMesh``, or torch's DeviceMesh of all ranks; None: all ranks are one shard group. Gradients, state
    and, in stage 3, weights are divided in a shard group (axis "shard" or "data"). Groups along "replicate" have
    copies, so gathers stay in a group, and sums go through it first (HSDP). See docs/zero_optimizer.md.
    compression: a ``zcomm.Compression``: gradients travel encoded, in the shard group, or with a mesh across groups
    only (``hops="all"``: in both). Each rank keeps the residue of its gradients, "errors" in ``memory()``. Weights that
    stage 3 gathers can travel encoded, too; with ``differences=True`` each rank keeps a copy of them ("bases").
    sparse_gradients: a ``zcomm.sparse_gradients.SparseGradients``: gradients of embeddings travel as rows. For stages
    0 to 2 and a model on the CPU.
    hpz: in stage 3 only weights have copies along "replicate"; gradients and state are divided among all ranks. Each
    step sends new weights across the groups. For CPU ranks of a host that share parameters.
    across: "step": the last micro-step of a step sends sums across groups. "micro": each one does, so that gradients of
    several have the bits of one shard group; the bytes between groups grow with their number.
    optimizer_args: options of a named optimizer or class, as torch's (lr, betas, momentum, ...).

    Gradients are averaged over the ranks and the ``grad_accum`` micro-steps; do not divide the loss. Call ``step()``
    and ``zero_grad()`` after every micro-step: they act on every ``grad_accum``-th (``boundary`` overrides the count).
    A step with a gradient that is not finite is skipped and counted in ``skipped_steps``, in fp16 (with a smaller scale
    then) and with ``skip_nonfinite``. In every precision ``nonfinite`` names the first such gradient. All ranks start
    with rank 0's weights. After ``backward()`` ``param.grad`` is a stand-in (a ``GradStandIn``) for the sums in the
    optimizer's accumulators. Programs change it in place, measure, drop or replace it as in torch.

    Raises: ValueError naming the argument; OSError (ENOSPC, EACCES) from the swap directory, at construction.
    """

    def __init__(
        self,
        model: ParamsOrModel,
        optimizer: OptimizerLike | None = "adamw",
        *,
        stage: int = 2,
        offload: str | Offload | None = None,
        nvme_path: StrPath | Sequence[StrPath] | None = None,
        precision: DTypeLike | Precision = "fp32",
        clip_norm: float | None = None,
        grad_accum: int = 1,
        bucket_mb: float = 25.0,
        prefetch: int = 1,
        overlap: bool = True,
        share_parameters: bool = True,
        comm: Communicator | None = None,
        mesh: ProcessMesh | DeviceMesh | None = None,
        hpz: bool = False,
        across: str = "step",
        loss_scale: LossScale | float | None = None,
        communication_dtype: DTypeLike | None = None,
        buffer_dtype: DTypeLike | None = None,
        skip_nonfinite: bool | None = None,
        units: Units | Sequence[UnitLike] | None = None,
        memory: int | str | MemoryLimit | None = None,
        device: torch.device | str | None = None,
        compression: Compression | None = None,
        sparse_gradients: SparseParams | None = None,
        **optimizer_args: Any,
    ) -> None:
        self._parts: Parts | None = None
        self._self = id(self)  # a wrapper with this object's __dict__ (Lightning's) may be freed before this object
        self._of_parent = False  # in a forked child: the threads and files are the parent's
        end_init()
        refused = ErrorHolder()  # its error is told to the other ranks, which wait for this one
        with refused.errors():
            stage, tiers = check_stage(stage), as_offload(offload, stage)
            kinds = as_precision(
                precision,
                communication_dtype=communication_dtype,
                buffer_dtype=buffer_dtype,
                loss_scale=loss_scale,
                skip_nonfinite=skip_nonfinite,
            )
            check_numbers(clip_norm, grad_accum, bucket_mb, prefetch)
            check_kinds(comm, overlap, share_parameters, hpz, across, nvme_path)
            cut = as_units(units)
            if stage == 3 and not isinstance(model, nn.Module):
                raise ValueError("stage=3 needs the model itself (it hooks its modules), not a list of parameters")
            scales = kinds.dtype == torch.float16
            scaler = LossScaler(kinds.loss_scale or LossScale()) if scales else LossScaler(1.0, scales=False)
            if isinstance(model, Iterator):
                model = list(model)
            groups, frozen = torch_groups(model, optimizer)
            own = list(inspect.signature(ZeroOptimizer).parameters)[:-1]
            rule, groups = choose_rule(optimizer, optimizer_args, groups, own)
            check_exchanges(rule, stage, tiers, memory)
            self._train = train = TrainState(
                stage,
                tiers,
                kinds,
                rule,
                scaler,
                kinds.skip_nonfinite,
                clip_norm,
                grad_accum,
                frozen,
                as_compression(compression),
                sparse_gradients,
            )
            super().__init__(groups, rule.defaults)
            index_of: dict[int, int] = {}
            self._state = ShardedState(train, index_of)
        job = job_of(comm, mesh, refused.error)
        if refused.error is None:
            with refused.errors():
                module = model if isinstance(model, nn.Module) else NoModel()
                owned_elsewhere = owned_params()
                check_free(self.param_groups, owned_elsewhere)
                named = list(module.named_parameters())
                check_not_lost(named)
                taken = [param for group in self.param_groups for param in group["params"]]
                names = names_of(module, taken)
                check_max_norm(module, job.world_size)
                owned = [(names[id(param)], param) for param in taken] + (named if stage == 3 else [])
                check_one_owner(module, owned, in_parts=mesh is not None)
                log_widened(named, kinds.dtype, job.rank)
                limit, self._guard, last_pass = as_limit(memory, job.local_world_size), NoGuard(), True
                if limit is not None and across == "micro" and grad_accum > 1:
                    raise ValueError(
                        f"across='micro' with a limit on memory and grad_accum={grad_accum} is not available: leave "
                        "one out"
                    )
        with ExitStack() as undo:  # a kept error would keep all parts
            limits = "memory=" if refused.error is None and limit is not None else "no memory="
            try:
                comms = comms_of(job, mesh, undo, hpz, across == "micro", refused.error, limits)
            finally:
                del refused
            comms.check_parts(owned, stage, memory)
            if limit is not None and comms.experts is not None:
                raise ValueError(f"memory={memory!r} with experts on different ranks is not available: leave it out")
            if limit is not None:
                shared = share_parameters and comms.shard.backend == "shm"
                with divided(memory, job.local_world_size):
                    chosen = within(limit, module, train, comms, bucket_mb, prefetch, cut, device, shared)
                train.offload, cut = chosen.offload, chosen.units
                bucket_mb, prefetch, last_pass = chosen.bucket_mb, chosen.prefetch, chosen.last_pass
                self._guard = Guard(limit, job.rank, chosen.on_device, module)
            self.units, self.bucket_mb, self.prefetch = cut, bucket_mb, prefetch
            consistency.check(
                train,
                comms,
                module,
                cut,
                bucket_mb=bucket_mb,
                prefetch=prefetch,
                share_parameters=share_parameters,
                hpz=hpz,
                across=across,
            )
            given = [param for group in self.param_groups for param in group["params"]]
            check_values(
                named or [(f"parameter {number}", param) for number, param in enumerate(given)], comms.shard_groups
            )
            parts, scheduler = build_parts(
                module,
                train,
                comms,
                undo,
                nvme_path=nvme_path,
                bucket_nbytes=int(bucket_mb * 2**20),
                prefetch=prefetch,
                overlap=overlap,
                share_parameters=share_parameters,
                owned_elsewhere=owned_elsewhere,
                units=cut,
                device=device,
                last_pass=last_pass,
            )
            self._parts = parts
            undo.pop_all()
        if isinstance(parts.store, UnitStore):
            parts.store.weights.row_weights.limited = self._guard.limited
        if optimizer is None and (stage == 3 or job.world_size > 1):
            parts.model_hooks += refuse_gradients(module)
        warn_of_integers(module, stage, job.rank)
        self.grad_accum = grad_accum
        index_of.update(parts.index_of)
        train.counters = StepCounters(rule, parts.group_of, len(self.param_groups))
        step = LocalStep if isinstance(parts.replicas, Replicas) else OptimizerStep
        self._micro_steps = MicroSteps(parts, train, step(parts, train, scheduler))
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        train.tied = ParamGroups(self, self.optimizer)
        opened(self)
        self._guard.look(self.memory, built=True)

    stage = _Of[int]()
    offload = _Of[Offload]()
    precision = _Of[Precision]()
    rule = _Of[Rule]()
    skip_nonfinite = _Of[bool]()
    clip_norm = _Of[float | None]()
    boundary = _Of[bool | None]()  # whether the next step() updates; None: every grad_accum-th does
    compression = _Of[Compression]()
    averages = _Of[bool]()  # over micro-steps; False: their losses are divided already
    grad_norm = _Of[float | None]()
    skipped_steps = _Of[int]()
    overflow = _Of[bool]()  # whether the last step was skipped; DeepSpeed's name, Accelerate reads it
    step_count = _Of[int]()  # optimizer steps, skipped ones included
    nonfinite = _Of[NonFinite | None]()
    param_groups = _Of[list[dict[str, Any]]]()  # as torch's
    updates = _Of[int]()  # calls of step() that used gradients; no load changes it

    @property
    def loss_scale(self) -> float:
        """Factor that ``backward()`` multiplies the loss by; 1 unless precision is fp16."""
        return self._train.loss_scale

    @property
    def cur_scale(self) -> float:
        """``loss_scale`` by DeepSpeed's name."""
        return self._train.loss_scale

    @property
    def loss_scaler(self) -> LossScaler:
        """The scaler of fp16; in other precisions one with the scale 1. (DeepSpeed's name.)"""
        return self._train.scaler

    @property
    def scaler(self) -> LossScaler | None:
        """The scaler of fp16; None: losses are not scaled."""
        return self._train.scaler if self._train.scaler.scales else None

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale changes by itself. (DeepSpeed's name.)"""
        return self.loss_scaler.dynamic

    @property
    def grad_accum(self) -> int:
        """Micro-steps per step. It can be set between steps."""
        return self._train.grad_accum

    @grad_accum.setter
    def grad_accum(self, count: int) -> None:
        check_accumulation(count)
        train = self._train
        if self._parts is not None:
            if train.micro_step:
                raise RuntimeError(
                    f"grad_accum={count}: micro-step {train.micro_step} of {train.grad_accum} is over: set it between "
                    "steps"
                )
            self._parts.reducer.passes = count
        train.grad_accum = count

    @property
    def gradient_factor(self) -> float:
        """Factor of accumulated gradients over their mean: micro-steps (if not divided yet) times loss scale."""
        return self._train.gradient_factor

    @property
    def _live(self) -> Parts:
        """The parts with the model's parameters attached, after an async step has ended.

        Data that the program has put into the parameters becomes the weights.
        """
        return parts_of(self)

    @property
    def _after_step(self) -> Parts:
        """The parts, after an async step has ended. Updates may wait for a forward."""
        parts = self._open_parts
        parts.updates.join()
        return parts

    @property
    def _open_parts(self) -> Parts:
        return open_parts(self)

    def join(self) -> None:
        """Wait for a step that runs behind the forward (``Offload(update="forward")``). Raises: its error."""
        _ = self._live

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: afterwards every parameter has its place in the shards."""
        if self._parts is not None:
            raise NotImplementedError("add_param_group() after construction: give all groups to ZeroOptimizer at once")
        super().add_param_group(param_group)

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The parameters that have taken a step; their arrays are sharded, and an access to them raises."""
        return self._state

    @state.setter
    def state(self, state: object) -> None:
        if getattr(self, "_state", state) is not state:  # torch's constructor sets an empty one before
            refuse("optimizer.state = ...")

    def __setstate__(self, state: dict[str, Any]) -> None:
        refuse("optimizer.__setstate__()")

    # --- training ---------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters, on every ``grad_accum``-th call. Collective then.

        closure: re-evaluates the model and returns the loss (with gradients), as in torch.
        Raises: PeerLost, TimeoutError, CollectiveMismatch, CudaError from gradients in flight; OSError from swap files,
        on all ranks. After an error or an interrupt during the update: RuntimeError in this, save and state_dict until
        ``load``. On a device the update begins while gradients are in flight.
        """
        self._check_trained("step")
        if not self._train.poison.unreported:  # else all ranks learn of it in the step
            self._train.poison.check("step()")
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        page = watch.current()
        if page is not None:
            probe.prepare(self)
        self._passes.end()
        if page is not None and self._train.stepped:
            page.stepped(probe.numbers)
        self._guard.look(self.memory)
        return loss

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        """Run ``loss.backward()``, with the loss scaled if precision is fp16."""
        self._check_trained("backward")
        self._passes.scaled(loss).backward(retain_graph=retain_graph)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return ``loss`` for one ``backward()`` by the program: scaled if precision is fp16."""
        self._check_trained("scale")
        return self._passes.scaled(loss)

    def needs_scaler(self) -> bool:
        """Return True if losses are scaled. (DeepSpeed's name.)"""
        return self._train.scaler.scales

    def _check_trained(self, call: str) -> None:
        if isinstance(self._train.rule, NoRule):
            raise RuntimeError(f"{call}(): {NO_OPTIMIZER}")
        self._open_parts.reducer.refuse_inside(f"{call}()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing between the micro-steps of one accumulation.

        set_to_none: False makes them zero, as torch does: a step without another pass then moves weights by momentum.
        """
        self._passes.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside add up their gradients on this rank, in fp32; the next one outside, or the step after
        it, reduces the sum. Fewer bytes move, but another order of summing changes the bits. Blocks may be nested.
        Memory: 4 bytes per element until then."""
        return self._passes.no_sync()

    def one_micro_step(self, joins: bool = False, scaled: bool = False) -> AbstractContextManager[None]:
        """Count the backward passes of the block as one micro-step of ``grad_accum``; ``step()`` follows it.

        Passes may be in ``no_sync()``, also all of them. joins: the block continues the micro-step of the last one.
        scaled: the losses of the passes are multiplied by ``loss_scale`` (of fp16)."""
        return self._passes.one(joins, scaled)

    @property
    def _passes(self) -> MicroSteps:
        """Return the micro-steps. Raises: RuntimeError if the optimizer is closed."""
        open_parts(self)
        return self._micro_steps

    # --- looking ----------------------------------------------------------------------------------------------

    def gathered(self, *, edits: str = "refuse") -> AbstractContextManager[nn.Module]:
        """Hold whole weights for the block ``with opt.gathered(): model.generate(...)``. Collective to enter and leave.

        Inside, forwards communicate nothing, so ranks may run the model a different number of times. Parameters do not
        require gradients there, so forwards build no graph.
        In stage 3 by units each parameter is a copy of this rank's own until the end; otherwise it is whole already.
        Blocks may be nested. The block is the model. Encoded weights (``Compression(weights=)``) are the exact ones.
        edits: "refuse": a parameter changed inside raises at the end, on all ranks. The change of a copy is lost; else
        it stays. "forget": every stage copies, frozen weights too, and changes are lost, for example of merged
        adapters. Inside of GatheredParameters(modifier_rank=) changes are kept.
        Raises: MemoryError, on all ranks, if copies take more than free memory and ``memory=`` leave. RuntimeError for
        ``backward``, ``step`` and loads inside, and if a pass is running. Memory: a copy of the weights on each rank.
        """
        return whole_model.gathered(self._open_parts, self._guard.room, edits)

    def export(
        self,
        callback: Callable[[str, torch.Tensor], object],
        *,
        dtype: torch.dtype | None = None,
        root: int | None = None,
        tied: bool = False,
    ) -> None:
        """Call ``callback(name, tensor)`` for each whole tensor of the model, to send it to another engine. Collective.

        The tensors are those of ``full_state_dict()``: parameters unit by unit, frozen ones included, then other ones
        and saved buffers. They are on the CPU, in the precision of training, and the callback may keep or change them.
        dtype: of floating tensors. root: the only rank that calls; None: each does. tied: call for every name of a tied
        weight; otherwise for its first one, as in ``save``. Memory: a tensor and a unit.
        Raises, on all ranks: the callback's error, on other ranks one that names rank, tensor and text (ValueError, or
        OSError). RuntimeError for ``backward`` and ``step`` in the callback.
        """
        train, parts = self._train, self._open_parts
        if root is not None and root not in range(parts.comm.world_size):
            raise ValueError(f"export(root={root}): ranks are 0 to {parts.comm.world_size - 1}")
        with with_remedy("export()", train):
            parts.updates.drain("export()")
        with with_remedy("export()", train), parts.looking():
            parts.verify()
            whole_tensors.export(parts, callback, dtype, root, tied)

    def memory(self) -> Memory:
        """Bytes of this rank by tier and purpose; memory shared in a host counts as nbytes / local_world_size."""
        return memory_of(self._after_step)

    def stats(self) -> dict[str, float]:
        """Cumulative seconds of the main thread's waits and looks for edited weights, and the swap file's traffic."""
        return stats_of(self._after_step, self._train)

    def allocation_count(self) -> int:
        """Allocations that the core ever made for this optimizer; constant after the second step."""
        return self._after_step.allocation_count()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the whole ``model.state_dict()`` on each rank. Collective in stage 3.

        It has parameters under each of their names (tied ones share memory), frozen ones, and this rank's buffers, all
        copied to the CPU.
        """
        train = self._train
        with with_remedy("full_state_dict()", train):
            self._open_parts.updates.drain("full_state_dict()")
        with with_remedy("full_state_dict()", train), self._open_parts.looking() as parts:
            parts.verify()
            return whole_tensors.full_state_dict(parts)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch's, with whole tensors on every rank. Collective.

        With 16-bit weights it also has ``master``, fp32. (``save`` only keeps a piece of a tensor in memory.)
        """
        train = self._train
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        with with_remedy("state_dict()", train):
            self._open_parts.updates.drain("state_dict()")
        with with_remedy("state_dict()", train), self._open_parts.looking() as parts:
            found = torch_state.state_dict(parts, train)
        for after in self._optimizer_state_dict_post_hooks.values():
            other = after(self, found)
            found = found if other is None else other
        return found

    def iter_state(self, *keys: str, root: int = 0) -> Iterator[StatePiece]:
        """Return an iterator over the weights and the optimizer's arrays, a piece of a parameter at a time.

        keys: ``weight`` (in the precision of training); with 16-bit weights ``master`` (fp32); torch's names of arrays,
        such as ``exp_avg`` (fp32). They are zeros before the first step. None given: all. Frozen parameters and saved
        buffers, which are this rank's, only have ``weight``. Tied parameters come once.
        Only rank ``root`` gets pieces. All ranks iterate to the end, because the others feed it.
        Memory: about 2 MiB per key on ``root``.
        Raises: ValueError for a key that is not kept or a rank that does not exist. RuntimeError for a ``step()`` or
        ``close()`` before the last piece. On all ranks, after the last piece: OSError for a failed read.
        """
        train, parts = self._train, self._open_parts
        wanted = keys_of(parts, train, keys)
        if root not in range(parts.comm.world_size):
            raise ValueError(f"iter_state(): root={root}: ranks are 0 to {parts.comm.world_size - 1}")
        with with_remedy("iter_state()", train):
            parts.updates.drain("iter_state()")
        return state_pieces(parts, train, wanted, root, train.step_count, lambda: self._parts is not None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict``, at any world size, stage, tier and precision. Collective.

        A state dict of torch's class of the same formula is accepted, too. Without ``master`` in it the weights are the
        model's: load those first. Raises: ValueError.
        """
        state_dict = copy(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            other = before(self, state_dict)
            state_dict = state_dict if other is None else other
        self._open_parts.reducer.refuse_inside("load_state_dict()")
        self._open_parts.updates.drain("load_state_dict()")  # the weights may be the model's
        torch_state.load_state_dict(self._live, self._train, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def save(
        self, directory: StrPath, *, scheduler: Any = None, client_state: Any = None, wait: bool = True
    ) -> checkpoint.SaveTask:
        """Save weights, optimizer state, counters, loss scale and random number generators as folder ``directory``.

        The folder appears whole: a run that is killed leaves the last one. A piece of a tensor at a time is in memory.
        scheduler: its ``state_dict()`` is saved. client_state: numbers, strings, tensors, numpy arrays and scalars, and
        lists, tuples, dicts and argparse Namespaces of them; rank 0's.
        wait: False copies this rank's shards, from RAM to RAM and from a drive to the same drive. The tensors are put
        together and written while training continues. The result's ``wait()`` raises if it failed. The next save, load
        and close wait for it.
        Gradients are not saved: during an accumulation this is logged once. Collective; between hosts all ranks need to
        see the same folder.
        Raises, on every rank: ValueError naming the way to a value that cannot be kept, before anything is written.
        OSError (naming the rank that failed; EBUSY for a mount point, or while another save is writing).
        """
        extras = checkpoint.ExtraState(scheduler, client_state)
        return checkpoint.save(self._open_parts, self._train, Path(directory).absolute(), extras, wait=wait)

    def load(
        self,
        directory: StrPath,
        *,
        scheduler: Any = None,
        optimizer: bool = True,
        random: bool = True,
        strict: bool = True,
    ) -> Any:
        """Load a folder of ``save``, at any world size, stage, tier and precision. Returns: the client state.

        optimizer: also its state, options and counters; False: only weights. random: also the random number generators,
        if the world size is the same. strict: the model's tensors are exactly those of the checkpoint. Otherwise one
        side may lack frozen parameters and buffers. Collective.
        Raises, before anything has changed: FileNotFoundError. OSError (EIO) naming file and tensor of a checksum that
        is wrong. ValueError listing names and shapes of another model or optimizer, or naming a field of a manifest.
        """
        self._open_parts.reducer.refuse_inside("load()")
        return checkpoint.load(
            self._open_parts,
            self._train,
            Path(directory).absolute(),
            scheduler=scheduler,
            with_optimizer=optimizer,
            with_random=random,
            strict=strict,
        )

    # --- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, free all memory and swap files. Idempotent; not collective.

        The model keeps its weights in memory of its own. In stage 3 by units it does so in a world of one, if they fit
        into host memory and ``memory=``. Otherwise its parameters raise when their values are used, until
        ``load_state_dict`` loads new ones: call ``save()`` or ``full_state_dict()`` first. Each rank keeps its shard if
        memory has room: another ZeroOptimizer of the model and the same ranks begins with these weights.
        Raises: RuntimeError inside of ``gathered()``.
        """
        if self._parts is not None and not self._parts.closed:
            self._parts.reducer.refuse_inside("close()")
        self._close(keep_weights=True)

    def _close(self, keep_weights: bool) -> None:
        """Close the parts. keep_weights: False if the program ends."""
        if self._parts is not None and self._parts.closed:
            self._parts = None
        if self._parts is not None:
            try:
                self._parts.end_saving()
            except Exception as error:
                logging.getLogger("zcomm").warning("a checkpoint could not be finished: %s", error)
            page = watch.current()
            if page is not None:
                page.flush(probe.numbers)
            self._parts.store.keeps_weights = keep_weights and self._parts.updates.end()
            self._parts.store.age = None if self._train.poison.error is not None else f"{self._train.updates} steps"
            self._parts.store.room, self._parts.store.groups = self._guard.room, self._parts.comms.shard_groups
            self._parts.close(at_exit=not keep_weights)
            self._parts = None
            self._train.tied.end()
            self._train.poison.clear()  # drops the error's frames

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError(
            "a ZeroOptimizer cannot be copied: it has shards, communicators and hooks; opt.state_dict() and opt.save() "
            "give its state, which another one loads"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a ZeroOptimizer cannot be pickled or copied: use opt.save(), or opt.state_dict()")

    def __del__(self) -> None:
        if getattr(self, "_parts", None) is not None and self._self == id(self) and not self._of_parent:
            self._close(keep_weights=True)
