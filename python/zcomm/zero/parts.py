"""Parts and TrainState: the components of one ZeroOptimizer, and its options, counters and results.

assemble.py makes the parts, step.py updates them, checkpoint/ saves and loads them. All of these take the two
dataclasses: no module below optimizer.py takes the optimizer itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.comm.codec import Compression
from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import Lane
from zcomm.zero.cache.swap import AnySwap
from zcomm.zero.files.save_task import SaveTask
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.gradients.reducer import GradientReducer
from zcomm.zero.gradients.transport import SparseParams
from zcomm.zero.gradients.values import NonFinite
from zcomm.zero.groups.compression import EXACT
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.cut import Cut
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.loss_scale import LossScaler
from zcomm.zero.onebit.replicas import NoReplicas
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.options import Offload, Precision
from zcomm.zero.param_groups import ParamGroups
from zcomm.zero.params.forward_edits import ForwardEdits
from zcomm.zero.params.rebinder import ParamRebinder
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.poison import Poison
from zcomm.zero.rules.counters import COUNTERS, StepCounters
from zcomm.zero.rules.rule import Rule
from zcomm.zero.update_hooks import UpdateHooks

# How long close() waits for other ranks, which may be about to do their part.
_PATIENCE_S, _STEP_PATIENCE_S = 0.5, 5.0
_GATHER_PATIENCE_S = 5.0  # without these gathers, which updates wait for, weights belong to two steps
_COUNTED = ("step_count", "updates", "skipped_steps", "overflow", "grad_norm", "nonfinite")  # of TrainState


@dataclass
class Parts:
    """The parts that one ZeroOptimizer owns.

    Parameters are numbered in the order of ``names``; the store's frozen ones are last. ``index_of`` is by id(),
    ``group_of`` by number. ``runs``: per bucket, (begin, end, group) of this rank's part; ``param_runs``: with the
    parameter instead, if the rule is indexed. ``first_index``: by number, elements before it in the param groups.
    """

    model: nn.Module
    names: list[str]
    cuts: list[Cut]  # this rank's part of each parameter ([Note: cuts])
    index_of: dict[int, int]
    group_of: list[int]
    geometry: Geometry
    comm: Communicator  # of all ranks
    comms: MeshComms
    arenas: tuple[_core.PinnedArena, ...]
    store: ParameterStore
    state: OptimState
    reducer: GradientReducer
    norm: GradientNorm
    runs: list[list[tuple[int, int, int]]]
    param_runs: list[list[tuple[int, int, int]]] | None
    first_index: list[int]
    swap: AnySwap
    model_hooks: list[Any]
    rebinder: ParamRebinder
    updates: UpdateHooks
    lane: Lane
    forward_edits: ForwardEdits
    replicas: NoReplicas
    save_comm: Communicator | None = None  # of checkpoints in the background; made by the first
    saving: SaveTask | None = None  # the last save, which may still be writing
    closed: bool = False

    def data_of(self, index: int) -> Communicator:
        """Return the communicator of the ranks with parameter ``index``."""
        return self.comms.of(self.geometry.bucket_of(index)).data

    def root_of(self, index: int, root: int) -> int:
        """Return rank ``root`` as a rank of ``data_of(index)``: see ``MeshComms.root_of``."""
        return self.comms.root_of(self.geometry.bucket_of(index), root)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.lane.device

    def join(self) -> Parts:
        """Run pending updates, and attach the model's parameters: their values become the weights. Returns: self, now
        idle. Raises: as ``UpdateHooks.wait``."""
        self.updates.wait()
        self.rebinder.restore()
        return self

    @contextmanager
    def looking(self) -> Iterator[Parts]:
        """Run pending updates, and attach parameters for the block; afterwards they have the program's data again."""
        self.updates.wait()
        with self.rebinder.shown():
            yield self

    @property
    def duplicates(self) -> set[int]:
        """Numbers of the trained parameters that ranks along "tensor" have whole."""
        trained = range(self.geometry.trained_count)
        return {index for index in trained if self.comms.is_duplicate(self.store.parameter(index))}

    def check_one_model(self, call: str) -> None:
        """Raise NotImplementedError, on all ranks, for a ``call`` that joins parts of ranks that cannot be joined."""
        self.comms.check_one_model(call, map(self.store.parameter, range(len(self.names))))

    def grow_state(self, rule: Rule, groups: Sequence[dict[str, Any]], saved: Collection[str] = ()) -> None:
        """Add missing arrays of the optimizer (``Rule.missing``), before a step or a load. Local.

        Raises: ValueError if the state cannot grow; MemoryError, CudaError.
        """
        missing = rule.missing(groups, saved)
        arrays = tuple(dict.fromkeys((*rule.arrays, *missing)))
        if arrays != rule.arrays:
            self.state.grow(arrays)
            self.updates.state_grew()
        if missing:
            rule.add_arrays(groups, saved)

    def verify(self, behind: bool = False) -> None:
        """Wait until the ranks have compared their calls between devices: with ``behind`` those before the last time.

        Collective. Raises: CollectiveMismatch with the remedy; as ``Communicator.verify``.
        """
        try:
            for comm in {id(comm): comm for comm in (*self.comms.joins, self.store.peers)}.values():
                comm.verify(behind)
        except _core.CollectiveMismatch as error:
            raise _core.CollectiveMismatch(
                f"{error}: weights may have been updated with wrong sums since; start again from the last checkpoint"
            ) from error

    def end_saving(self) -> None:
        """Wait for a save in the background. Raises: its error, unless its ``wait()`` has raised it."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.end()

    def allocation_count(self) -> int:
        """Count the allocations that the core has ever made for these parts."""
        count = sum(comm.memory()["allocation_count"] for comm in self.comms.every)
        return count + self.store.allocation_count + sum(arena.stats()["allocation_count"] for arena in self.arenas)

    def close(self, at_exit: bool = False) -> None:
        """Close all parts, also after failures. No part waits for another rank; an error of one skips no other.

        at_exit: the program ends: an async step that does not end soon is abandoned, too.
        """
        self.closed = True
        with ExitStack() as last_first:
            owned = (
                self.comms,
                self.lane,
                self.save_comm,
                self.swap,
                self.store,
                self.state,
                self.replicas,
            )
            for part in owned:
                if part is not None:
                    last_first.callback(part.close)
            last_first.callback(self.reducer.close)
            last_first.callback(self.lane.drain)
            for hook in self.model_hooks:
                last_first.callback(hook.remove)
            last_first.callback(self.updates.close)
            last_first.callback(self._give_up_pending, at_exit)

    def gathers_end(self) -> bool:
        """Wait briefly for gathers that wait for other ranks. Returns: whether none is left."""
        end = time.monotonic() + _GATHER_PATIENCE_S
        while self.store.is_waiting() and time.monotonic() < end:
            time.sleep(0.002)
        return not self.store.is_waiting()

    def _give_up_pending(self, at_exit: bool) -> None:
        """Leave the other ranks if operations that they take part in do not end soon.

        A signal, say, has ended training in the middle of a step.
        """
        now = time.monotonic()
        while True:
            patience_s = _PATIENCE_S if self.reducer.is_waiting() or self.store.is_waiting() else None
            if patience_s is None and at_exit and self.updates.is_running():
                patience_s = _STEP_PATIENCE_S
            if patience_s is None:
                return
            if time.monotonic() - now > patience_s:
                break
            time.sleep(0.002)
        self.comms.close()
        self.store.give_up()


@dataclass
class TrainState:
    """Options, counters and results of one ZeroOptimizer's training. The first fields are ZeroOptimizer's attributes.

    frozen: parameters that were given to be trained, but were frozen then. sparse: with gradients that are reduced as
    rows. averages: gradients are averaged over micro-steps; False: their losses are divided already. summed_ranks: how
    many ranks' gradients are summed; 1: they are averaged. overflow: the last step was skipped. step_count: optimizer
    steps, skipped ones included. updates: steps that used gradients. No load changes it. backwards: backward passes
    before the last step() or zero_grad().
    pass_scale: the loss scale of the gradients that are kept, which a step does not change.
    step_s: seconds in steps; waited_s: of these, waiting for other ranks.
    """

    stage: int
    offload: Offload
    precision: Precision
    rule: Rule
    scaler: LossScaler
    skip_nonfinite: bool
    clip_norm: float | None
    grad_accum: int
    frozen: Sequence[torch.Tensor] = ()
    compression: Compression = EXACT
    sparse: SparseParams | None = None
    param_groups: list[dict[str, Any]] = field(default_factory=list)
    boundary: bool | None = None
    averages: bool = True
    summed_ranks: float = 1
    grad_norm: float | None = None
    skipped_steps: int = 0
    overflow: bool = False
    step_count: int = 0
    nonfinite: NonFinite | None = None
    updates: int = 0

    micro_step: int = 0
    stepped: bool = True
    backwards: int = 0
    scaled_passes: int = 0
    pass_scale: float = field(init=False)
    step_s: float = 0.0
    waited_s: float = 0.0
    poison: Poison = field(default_factory=Poison)
    counters: StepCounters = field(init=False)  # set after the parts are built
    tied: ParamGroups = field(init=False)  # set after the parts are built

    def __post_init__(self) -> None:
        self.pass_scale = self.loss_scale

    @property
    def loss_scale(self) -> float:
        """Factor that ``backward()`` multiplies the loss by; 1 unless precision is fp16."""
        return self.scaler.scale

    @property
    def gradient_factor(self) -> float:
        """Factor of accumulated gradients over their mean: micro-steps (if not divided yet) times loss scale.

        Accumulators hold the ranks' mean. If gradients are summed, the factor is smaller by ``summed_ranks``.
        """
        return (self.grad_accum if self.averages else 1) * self.pass_scale / self.summed_ranks

    @property
    def needs_norm(self) -> bool:
        """True if a norm, or whole parameters, must be known before the first update."""
        decides = self.skip_nonfinite or self.clip_norm is not None
        return decides or self.rule.sums > 0 or bool(self.rule.whole_matrices)

    @property
    def needs_all_gradients(self) -> str:
        """Name an option that needs all gradients of a step before the first update, or return ""."""
        if self.clip_norm is not None:
            return f"clip_norm={self.clip_norm}"
        if self.grad_accum > 1:
            return f"grad_accum={self.grad_accum}"
        if self.scaler.scales and not self.offload.atomic:
            return "precision='fp16' (its loss scale)"
        if self.skip_nonfinite and not self.offload.atomic:
            return "skip_nonfinite=True"
        return "boundary=False" if self.boundary is False else ""

    def kept(self) -> Callable[[], None]:
        """Copy the values that a step counts. Returns: a function that restores them."""
        cohorts, scalars, groups = self.counters, self.rule.scalars, self.param_groups
        values = {name: getattr(self, name) for name in _COUNTED}
        scaler = dict(vars(self.scaler))
        counters = [{key: group[key] for key in COUNTERS if key in group} for group in groups]
        others, numbers, before = deepcopy(cohorts.others), list(cohorts.number_of), deepcopy(scalars)

        def restore() -> None:
            for name, value in values.items():
                setattr(self, name, value)
            vars(self.scaler).update(scaler)
            for group, kept in zip(groups, counters, strict=False):
                for key in COUNTERS:
                    group.pop(key, None)
                group.update(kept)
            cohorts.others[:], cohorts.number_of[:] = deepcopy(others), numbers
            scalars[:] = deepcopy(before)

        return restore

    def forget_passes(self) -> None:
        """Begin the accumulation again, because its gradients are lost."""
        self.micro_step = self.scaled_passes = 0
