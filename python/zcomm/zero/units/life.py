"""UnitManager: which units are whole, and when.

[Note: unit life] Parameters live as shards; a unit is whole only around its use. A unit that is not in use keeps its
memory until another needs it (``drop``). The calls around a use, in order:
- hooks.py, before a module runs: ``use``, and in it ``ensure``
- ``memory.take``: memory that is not in use; ``memory.fill``: asks the gathering thread, or copies; so far a prefetch
- ``memory.wait``, ``memory.map``: the unit is behind its addresses
- ``weights.attach``, ``weights.make_plain``: the parameters are views of it, and ordinary ones
- hooks.py, after the module: ``weights.make_stand_ins``; ``drop`` with ``weights.detach``, ``memory.give_back``

An interrupt may come between any two of these lines. A unit is in ``_changing`` while its state and its memory may
disagree; the next ``ensure`` makes units that an interrupt left there SHARDED again. While the host waits for a gather
its unit is not in ``_changing``. After an interrupt the gather continues, and a later call waits for it.

SHARDED -> GATHERING -> GATHERED -> SHARDED. The root unit and resident units have memory of their own and remain
GATHERED until the step. After a step every unit is SHARDED again, because its weights have changed. If weights are on a
drive, the first units of the next forward are gathered again at once (``read_ahead``).

All ranks must use their units in the same order. The gathers' names are compared, so that ranks which run different
modules raise an error that names both units. Prefetch follows the order of the last pass.
Thread rule: the main thread, or autograd's.
Source: ZeRO stage 3 (arXiv:1910.02054), prefetch of ZeRO-Infinity (arXiv:2104.07857).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from zcomm.zero.options import ahead_of
from zcomm.zero.poison import HalfDoneError
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan, UnitPool
from zcomm.zero.units.unit import Unit, UnitState
from zcomm.zero.units.weights import UnitWeights
from zcomm.zero.update_hooks import UpdateHooks


class UseOrder:
    """The order in which a pass uses units, learned from the last pass, so that the next units can be prefetched.

    ``coming``: the units that this pass will use if it repeats the last one; empty once it differs.
    A pass begins with the model's forward. If a program calls only submodules, a pass begins with the first use after a
    step or, outside backward, with a change of grad mode. Without gradients no step ends a pass, so the return to its
    first unit begins the next one. Passes with and without gradients have orders of their own. Uses of one unit in a
    row are one use: the parts of a batch (zcomm.split_batch), or a backward that recomputes the forward.
    """

    def __init__(self) -> None:
        self.trace: list[int] = []
        self.coming: Sequence[int] = ()
        self._last: dict[bool, list[int]] = {}  # by grad mode
        self._grad_mode = True
        self._in_model = False  # its forward runs
        self._ended = True

    def begin(self, in_model: bool = False) -> None:
        if self.trace:
            self._last[self._grad_mode] = self.trace
        self.trace, self.coming = [], ()
        self._grad_mode = torch.is_grad_enabled()
        self._in_model, self._ended = in_model, False

    def leave_model(self) -> None:
        self._in_model = False

    def end(self) -> None:
        """End the pass at a step: the next use begins a new one."""
        self._in_model, self._ended = False, True

    def first(self) -> Sequence[int]:
        """Return the order of the last pass with gradients, or if none had any of the last one: it predicts the next
        pass. Empty: none was seen."""
        return self.trace if self.trace and self._grad_mode else self._last.get(True, self.trace)

    def use(self, unit: int) -> None:
        if self._begins(unit):
            self.begin()
        if self.trace and self.trace[-1] == unit:
            return
        self.trace.append(unit)
        last = self._last.get(self._grad_mode, [])
        here = len(self.trace) - 1
        follows = here < len(last) and last[here] == unit
        self.coming = last[here + 1 :] if follows else ()

    def _begins(self, unit: int) -> bool:
        if self._in_model or torch._C._current_graph_task_id() >= 0:
            return False
        grad_mode = torch.is_grad_enabled()
        again = not grad_mode and bool(self.trace) and self.trace[0] == unit
        return self._ended or again or grad_mode != self._grad_mode


class UnitManager:
    """The units of ``memory``. held: id() of parameters that are whole copies. running: number of running forwards.
    updates: hooks that are called at each use."""

    def __init__(
        self, plan: UnitPlan, memory: UnitPool, gather: ShardGather, weights: UnitWeights, updates: UpdateHooks
    ) -> None:
        self.memory, self._gather, self.weights, self._updates = memory, gather, weights, updates
        memory.owner = weights.life = self
        self.units = memory.units
        self._prefetch = (plan.prefetch, plan.prefetch_nbytes)
        self._sizes = [unit.nbytes for unit in self.units]
        self._clock = 0
        self.held: set[int] = set()
        self.running = 0
        self._changing: dict[int, Unit] = {}  # by number
        self.in_use: Unit | None = None  # prefetch must not take its memory
        self.order = UseOrder()
        self.waited_s = 0.0

    # --- gathering --------------------------------------------------------------------------------------------

    def ensure(self, unit: Unit) -> None:
        """Make ``unit`` whole. Collective, unless it is whole already."""
        self._updates.before_use()
        self._clock += 1
        unit.last_use = self._clock
        if self._changing:
            self._recover()
        self.memory.end_edits()
        if unit.state is UnitState.GATHERED and unit.stale:
            self.drop(unit)  # only here, because it is gathered again at once: live graphs may have views of it
        if unit.state is UnitState.GATHERED or self.is_held(unit):
            self._updates.check_use(unit.index)
            return
        if unit.state is UnitState.SHARDED and not self._start(unit, must=True):
            self.memory.add(unit)
            self._start(unit, must=True)
        try:
            self.memory.wait(unit)
        except BaseException as error:
            self._updates.gather_failed(error)
            raise
        self._updates.check_use(unit.index)
        self._changing[unit.index] = unit
        self.memory.map(unit)
        unit.state = UnitState.GATHERED
        self._changing.pop(unit.index, None)

    def join(self, unit: Unit) -> None:
        """Wait for the unit's gather and put the unit into ``_changing``. After a failed gather it remains there."""
        gathering = unit.gathering
        assert gathering is not None
        start = time.perf_counter()
        try:
            gathering.result()
        finally:
            self.waited_s += time.perf_counter() - start
            if gathering.done():  # otherwise this thread was interrupted, and the gather continues
                self._changing[unit.index] = unit
                unit.gathering = None
            del gathering  # its error refers to this frame, and the cycle would keep everything alive

    def is_held(self, unit: Unit) -> bool:
        """Return True if all parameters of the unit are whole copies: nothing to gather."""
        return bool(self.held) and all(id(param) in self.held for param, _ in unit.views)

    def _recover(self) -> None:
        """Make SHARDED the units in ``_changing``, which an interrupt or an error left there."""
        self._gather.synchronize()
        for unit in list(self._changing.values()):
            self.weights.detach(unit)
            self.memory.reset(unit)
        self.memory.count_free()
        self._changing.clear()

    def forget(self) -> None:
        """Make every unit SHARDED, also units in use: the weights have been replaced, and an error ends that use."""
        self._changing.update({unit.index: unit for unit in self.units if unit.state is not UnitState.SHARDED})
        self._recover()

    def _start(self, unit: Unit, must: bool = False) -> bool:
        """Start SHARDED -> GATHERING; return False if all memory for the unit is in use."""
        self._changing[unit.index] = unit
        if not self.memory.take(unit, must):
            del self._changing[unit.index]
            return False
        unit.state, unit.asked = UnitState.GATHERING, False
        unit.edits = self.weights.edits
        unit.gather_name = f"{unit.reader}unit {unit.name}"
        with torch._C._DisableFuncTorch():  # inside torch.func.grad new tensors would have no address
            self.memory.fill(unit)
        unit.asked = True
        del self._changing[unit.index]
        return True

    def drop(self, unit: Unit) -> None:
        """Change GATHERED -> SHARDED: the unit's memory is free for other units."""
        self._changing[unit.index] = unit
        self.weights.detach(unit)
        self.memory.give_back(unit)
        del self._changing[unit.index]

    @property
    def coming(self) -> Sequence[int]:
        return self.order.coming

    # --- calls of the hooks -----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """Begin the model's forward: store the order of the last pass, start a new one."""
        self.order.begin(in_model=True)
        self.weights.take_back(self.units[:1])
        self.ensure(self.units[0])
        self._attach(self.units[0])

    def _attach(self, unit: Unit) -> None:
        if not unit.attached and unit.state is UnitState.GATHERED:
            self.weights.attach(unit)

    def end_forward(self) -> None:
        """End the model's forward."""
        self.order.leave_model()

    def show_or_hide(self, unit: Unit) -> None:
        """Make the unit's parameters ordinary ones when a use has begun, and stand-ins when it has ended."""
        if unit.plain is unit.idle or unit.parted:
            if unit.idle:
                self.weights.make_stand_ins(unit)
            elif unit.attached or self.is_held(unit):
                self.weights.make_plain(unit)

    def reached(self, unit: Unit, param: nn.Parameter) -> None:
        """Hide ``param`` once its gradient is complete: hooks of the program must not act on the gathered copy."""
        if not unit.in_forward and id(param) not in self.held:
            self.weights.make_stand_in(param)
            unit.parted = True

    def use(self, unit: Unit) -> None:
        """Prepare ``unit`` for a module that is about to run, forward or backward."""
        self.weights.take_back([unit])
        self.ensure(unit)
        self._attach(unit)
        if unit.index == 0 or self.held:
            return  # while parameters are held, forwards have another order than training
        self.order.use(unit.index)
        self.in_use = unit
        for index in ahead_of(self.order.coming, self._sizes, *self._prefetch):
            if self.units[index].state is UnitState.SHARDED:
                self._start(self.units[index])
        self.in_use = None
        self._updates.after_use()

    def read_ahead(self) -> None:
        """Start to gather the first units of the next forward after a step: the root unit and as many as ``use`` would.
        All ranks do so, in one order. Does not wait."""
        if self.held or self.running or self._changing:
            return
        first = list(dict.fromkeys(self.order.first()))
        for index in (0, *ahead_of(first, self._sizes, *self._prefetch)):
            if self.units[index].state is UnitState.SHARDED:
                self._start(self.units[index])

    def before_edit(self, unit: Unit, name: str) -> None:
        """Prepare for a change of this rank's elements of the parameter ``name``, outside of a step."""
        self._updates.check("a change of weights")  # on each rank
        in_pass = self.running or torch._C._current_graph_task_id() >= 0
        if not unit.idle or (unit.by_rows and in_pass):
            raise RuntimeError(
                f"{name}: a weight of stage 3 by units cannot be changed while its module runs forward or backward: "
                "change it between passes"
            )
        if unit.state is UnitState.GATHERING:
            self.ensure(unit)
        unit.stale = unit.state is UnitState.GATHERED
        self._gather.bases.rewrite(unit)
        self.memory.begin_edit()

    def invalidate(self) -> None:
        """Make every unit SHARDED again: the weights have changed."""
        if self._changing:
            self._recover()
        self.running, self.in_use = 0, None
        self.order.end()
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                self._end_gathering(unit)
            unit.in_forward, unit.in_backward, unit.surrounds = 0, False, False
            self.show_or_hide(unit)
            if unit.state is UnitState.GATHERED:
                self.drop(unit)
        self.memory.end_step()

    def _end_gathering(self, unit: Unit) -> None:
        """Wait for a gather that is no longer needed. Ignore a drive's error, because the next read raises it again."""
        try:
            self.ensure(unit)
        except HalfDoneError:
            self._recover()
        except OSError as error:
            if isinstance(error, (TimeoutError, ConnectionError)) or error.errno is None:
                raise  # an error of the ranks, not of a drive
            self._recover()

    def end(self) -> None:
        """Drop all units, including units in GATHERING, because the gathering thread has ended."""
        for unit in self.units:
            unit.gathering = None
            if unit.state is not UnitState.SHARDED:
                self.drop(unit)
