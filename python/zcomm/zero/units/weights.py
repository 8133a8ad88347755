"""The program's parameters in stage 3 by units: ordinary while their unit is used, else stand-ins ([Note: stand-ins]).

[Note: plain and sharded] A parameter's data and its class change, for all parameters of a unit at once. Its data is a
view of the unit's addresses from the unit's use in a pass until the unit loses its memory. Otherwise the data is the
placeholder tensor (``attach``, ``detach``). Its class is its own one while a module of the unit runs forward or
backward, or while it is held (GatheredParameters). Otherwise the class is a stand-in's (``make_plain``,
``make_stand_ins``). So forward, compiled code and autograd see ordinary parameters. Operations of the program between
passes reach the stand-in, even if the unit is still whole. In use, "its own class" is a subclass of it
([Note: in use]), so that ``make_stand_ins`` detects changes.
Thread rule: as UnitManager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from zcomm.zero.rows.ops import Rows
from zcomm.zero.sharded import param as stand_in
from zcomm.zero.sharded.closed import ClosedShards, ClosedValue
from zcomm.zero.sharded.in_use import Lease, class_in_use
from zcomm.zero.sharded.source import Act, Use
from zcomm.zero.units.memory import UnitPool
from zcomm.zero.units.row_weights import RowWeights
from zcomm.zero.units.state_dict import CALL
from zcomm.zero.units.unit import Unit, UnitState

_plain: Any = torch._C.DisableTorchFunctionSubclass
_tensor: Any = torch.Tensor
_CLOSED = (
    "its ZeroOptimizer is closed, and the weights were on other ranks or a drive: before close() call save(), "
    "full_state_dict(), or export"
)
_KEPT = "; each rank has its shard, from which another ZeroOptimizer of the model begins"

_NOT_RUNNING = (
    "%s: %s uses the weight while its module, unit %s, does not run: it is copied whole, until backward "
    "has used the copy. With Units(resident=[...]) a block is not split by max_bytes. This is logged once"
)


def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of the true shape without memory: every read gives NaN, and torch refuses to write to it."""
    return (
        torch.full((1,), float("nan"), dtype=dtype, device=device)
        .expand(shape.numel())
        .as_strided(shape, [0] * len(shape))
    )


# A parameter, its classes in use and as stand-in, the placeholder tensor.
_Entry = tuple[nn.Parameter, type, type, torch.Tensor]


def _versions(entries: Sequence[_Entry]) -> list[tuple[int, int]]:
    return [(param._version, _tensor.data_ptr(param)) for param, _, _, _ in entries]


class Store(Protocol):
    """The methods of the store that the weights call."""

    @property
    def alone(self) -> bool:
        """Return True if there is one rank."""

    def unit_of(self, param: int) -> Unit: ...
    def full(self, param: int) -> torch.Tensor: ...
    def after_edit(self) -> None: ...


class Life(Protocol):
    """The methods of UnitManager that the weights call."""

    held: set[int]
    running: int
    memory: UnitPool

    def before_edit(self, unit: Unit, name: str) -> None: ...


class Hooks(Protocol):
    """The methods of UnitHooks that the weights call."""

    def using(self, unit: Unit) -> Use:
        """Run a function that uses the unit as one of its modules would."""

    def clear_interrupted(self) -> None:
        """Forget passes that ended with an exception."""


class UnitWeights:
    """Parameters of one store of units, ordinary ones while they are used and stand-ins otherwise.

    life: set by UnitManager. hooks: set by UnitHooks. row_weights: set by the store. edit: ``edit(number, act)``
    changes this rank's elements and their masters; set by ``open``.
    """

    life: Life
    hooks: Hooks
    row_weights: RowWeights

    def __init__(self, store: Store, params: Sequence[nn.Parameter], shapes: Sequence[torch.Size]) -> None:
        self._store = store
        self._params = params
        self._shapes = shapes
        self._numbers = {id(param): number for number, param in enumerate(params)}
        self._kinds: dict[type, type] = {}  # by a parameter's own class: class of its stand-in
        self._used: dict[type, type] = {}  # by a parameter's own class: class of a parameter in use
        self._own: list[type] = [nn.Parameter] * len(params)
        self._placeholders: dict[int, torch.Tensor] = {}
        self._names: Sequence[str] = [f"parameter {number}" for number in range(len(params))]
        self._edit: Callable[[int, Act], None] | None = None
        self._stamps = [0] * len(params)
        self._entries_of: dict[int, list[_Entry]] = {}  # by number of the unit
        self._made_plain: dict[int, list[tuple[int, int]]] = {}  # by unit: versions and addresses from ``make_plain``
        # By unit, by id(): numbers of ``address_checks``, of parameters with a known address.
        self._exposed: dict[int, dict[int, int]] = {}
        self._warned = self._warned_part = False
        self.aside: set[int] = set()  # numbers of parameters that are temporarily ordinary ones of another dtype
        self.edits = 0
        self.closed = False
        self._shards: ClosedShards | None = None  # once it is closed

    def open(self, names: Sequence[str], edit: Callable[[int, Act], None]) -> None:
        self._names, self._edit = names, edit

    # --- the parameters themselves -----------------------------------------------------------------------------

    def start(self, number: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make the parameter a stand-in, because the store has its first value."""
        param = self._params[number]
        if not isinstance(param, (stand_in.ShardedParameter, *self._used.values())):
            self._own[number] = own = type(param)
            if own not in self._kinds:
                self._kinds[own] = stand_in.class_for(own, self)
                self._used[own] = class_in_use(own, self)
        self._placeholders[number] = _placeholder(self._shapes[number], dtype, device)
        self._empty(number)

    def _empty(self, number: int) -> None:
        param = self._params[number]
        with _plain():
            param.data = self._placeholders[number]
        param.__class__ = self._kinds[self._own[number]]

    def _entries(self, unit: Unit) -> list[_Entry]:
        """Return the entries of the unit's parameters that are not held."""
        entries = self._entries_of.get(unit.index)
        if entries is None:
            numbers = [self._numbers[id(param)] for param, _ in unit.views]
            entries = self._entries_of[unit.index] = [
                (self._params[n], self._used[self._own[n]], self._kinds[self._own[n]], self._placeholders[n])
                for n in numbers
            ]
        held = self.life.held
        return [entry for entry in entries if id(entry[0]) not in held] if held else entries

    def attach(self, unit: Unit) -> None:
        """Make the unit's parameters views of its memory."""
        held = self.life.held
        with _plain():
            for param, view in unit.views:
                if id(param) not in held:
                    param.data = view
        unit.attached = True

    def detach(self, unit: Unit) -> None:
        """Replace the data of the unit's parameters by placeholders, and make them stand-ins."""
        self._made_plain.pop(unit.index, None)
        with _plain():
            for param, _, kind, placeholder in self._entries(unit):
                param.data = placeholder
                param.__class__ = kind
        unit.plain = unit.attached = unit.parted = False  # last, because after an interrupt ``detach`` runs again

    def make_plain(self, unit: Unit) -> None:
        """Make the unit's parameters ordinary ones."""
        unit.plain, unit.parted = True, False
        entries = self._entries(unit)
        for param, used, _, _ in entries:
            param.__class__ = used
        for number in self._exposed.pop(unit.index, {}).values():
            self.life.memory.address_checks.forget(number)
        self._made_plain[unit.index] = _versions(entries)

    def make_stand_ins(self, unit: Unit) -> None:
        """Make them stand-ins again.

        Raises: RuntimeError if the program has changed one meanwhile, because other ranks may have changed the same
        memory. In a world of one the change is kept.
        """
        before, entries = self._made_plain.pop(unit.index, None), self._entries(unit)
        exposed = self._exposed.pop(unit.index, {})
        values = []
        if before is not None and len(before) == len(entries):
            with _plain():
                now = _versions(entries)
                if now != before or exposed:
                    values = [
                        (param, _tensor.detach(param).clone())
                        for (param, _, _, _), a, b in zip(entries, now, before, strict=True)
                        if self._is_written(param, a != b, exposed.get(id(param)))
                    ]
        for param, _, kind, _ in entries:
            param.__class__ = kind
        unit.plain = unit.parted = False
        for param, value in values:
            self._take_over(unit, param, value)

    def _is_written(self, param: nn.Parameter, moved: bool, exposed: int | None) -> bool:
        """Return True if the program has changed a parameter in use. moved: its version counter or its address
        differs. exposed: entry of ``expose``. Entries of a device are compared at the next step."""
        checks = self.life.memory.address_checks
        if exposed is None:
            return moved
        if not moved:
            return checks.end(exposed, param, self.name(param))
        checks.forget(exposed)
        return True

    def _take_over(self, unit: Unit, param: nn.Parameter, value: torch.Tensor) -> None:
        """Keep ``value``, to which the program changed a parameter in forward or backward."""
        self.attach(unit)
        if not self._store.alone or value.shape != self.placeholder(param).shape:
            raise RuntimeError(
                f"{self.name(param)} was changed while its module ran (in place, or as by nn.Embedding(max_norm=)):"
                " stage 3 by units cannot keep that; change it between passes, on all ranks"
            )
        flat = value.reshape(-1)
        self.edit(param, lambda piece, elements: piece.copy_(flat[elements]))

    def make_stand_in(self, param: nn.Parameter) -> None:
        """Make one parameter a stand-in, because its use ended before the others'."""
        param.__class__ = self._kinds[self._own[self._numbers[id(param)]]]

    def hold(self, number: int) -> None:
        """Make the parameter an ordinary one, because its data is about to be a whole copy."""
        self._params[number].__class__ = self._own[number]

    def release(self, number: int, unit: Unit) -> torch.Tensor:
        """End ``hold``: return the parameter's data from now on."""
        param = self._params[number]
        if unit.plain:
            param.__class__ = self._used[self._own[number]]
        else:
            self.make_stand_in(param)
        if unit.attached:
            return next(view for other, view in unit.views if other is param)
        return self._placeholders[number]

    def changed(self) -> None:
        """Mark the trained weights as new, so that graphs and copies of the old weights are detected."""
        self._stamps = [stamp + 1 for stamp in self._stamps]
        with _plain():
            torch.autograd.graph.increment_version(self._params)

    def close(self, values: dict[int, torch.Tensor], shards: ClosedShards | None) -> None:
        """Make parameters in ``values`` (by number) ordinary ones with these values, the others stand-ins without
        values. shards: the source of these values for another optimizer."""
        held, self.closed, self._shards = self.life.held, True, shards
        for number, param in enumerate(self._params):
            if number in self.aside:
                continue
            if number in values and id(param) not in held:
                param.__class__ = self._own[number]
                param.data = values[number]
            elif id(param) not in held and number in self._placeholders:
                self._empty(number)

    def kept(self, param: nn.Parameter) -> ClosedValue | None:
        """Return the value that the ranks keep of a parameter of a closed optimizer, in shards; None: no value."""
        return None if self._shards is None else self._shards.value(self._numbers[id(param)])

    def has(self, param: nn.Parameter) -> bool:
        return id(param) in self._numbers

    # --- Owner, of parameters in use ----------------------------------------------------------------------------

    def lease(self, param: nn.Parameter) -> Lease:
        unit = self._store.unit_of(self._numbers[id(param)])
        return Lease(self, self.name(param), param, unit, self.life.memory.slot_of(unit))

    def has_memory(self, lease: Lease) -> bool:
        return lease.unit.state is UnitState.GATHERED and self.life.memory.slot_of(lease.unit) is lease.slot

    def is_used(self, lease: Lease) -> bool:
        return lease.unit.plain and id(lease.param) not in self.life.held

    def expose(self, lease: Lease) -> None:
        if lease.unit.plain:
            known, checks = self._exposed.setdefault(lease.unit.index, {}), self.life.memory.address_checks
            if id(lease.param) not in known:
                known[id(lease.param)] = checks.begin(lease.param)

    # --- Keeper -------------------------------------------------------------------------------------------------

    def name(self, param: nn.Parameter) -> str:
        return self._names[self._numbers[id(param)]]

    def placeholder(self, param: nn.Parameter) -> torch.Tensor:
        return self._placeholders[self._numbers[id(param)]]

    def set_aside(self, param: nn.Parameter, value: torch.Tensor) -> None:
        number = self._numbers[id(param)]
        self.life.before_edit(self._store.unit_of(number), self._names[number])
        self.life.held.add(id(param))
        self.aside.add(number)
        self.revive(param, value)

    def take_back(self, units: Sequence[Unit]) -> None:
        """Take back parameters that the program converted to another dtype, and swapped parameters of ``units``.

        Raises: RuntimeError naming a parameter that cannot be taken back.
        """
        if self.aside:
            self._take_converted()
        self._take_swapped(units)

    def _take_converted(self) -> None:
        """Keep the values of parameters set aside. Raises: RuntimeError naming one that still has another dtype."""
        for number in sorted(self.aside):
            param, like = self._params[number], self._placeholders[number]
            if (param.dtype, param.shape) != (like.dtype, like.shape):
                raise RuntimeError(
                    f"parameter {self._names[number]} is {param.dtype} {tuple(param.shape)} now, but ZeroOptimizer was "
                    f"built for {like.dtype} {tuple(like.shape)}: convert the model before ZeroOptimizer is built, "
                    "or choose its precision="
                )
            flat = param.detach().reshape(-1)
            self.life.held.discard(id(param))
            self.aside.discard(number)
            self._empty(number)
            self.edit(param, lambda piece, elements, flat=flat: piece.copy_(flat[elements]))  # type: ignore[misc]

    def _take_swapped(self, units: Sequence[Unit]) -> None:
        """Keep the values that ``torch.utils.swap_tensors`` has put in place of stand-ins of idle units.

        Raises: RuntimeError naming one that was swapped with another stand-in, because that has no values.
        """
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # type: ignore[no-untyped-call,unused-ignore]  # stand-ins are not traced
        held, lost = self.life.held, []
        for unit in units:
            if unit.plain or not unit.idle:
                continue
            for param, view in unit.views:
                if id(param) in held:
                    continue
                number = self._numbers[id(param)]
                kind, home = self._kinds[self._own[number]], view if unit.attached else self._placeholders[number]
                with _plain():  # after an interrupt its data may be either the view or the placeholder
                    if param.data_ptr() in (view.data_ptr(), self._placeholders[number].data_ptr()):
                        continue
                    value, is_plain = param.detach(), param.__class__ is not kind
                    param.__class__ = kind
                    param.data = home
                if is_plain:
                    param.data = value
                else:
                    lost.append(self._names[number])
        if lost:
            raise RuntimeError(
                f"{', '.join(lost)}: swap_tensors() of weights that are sharded over ranks is not possible: they have "
                "the values of before; exchange copies (p.data = other.clone())"
            )

    def revive(self, param: nn.Parameter, value: torch.Tensor) -> None:
        param.__class__ = self.own_class(param)
        param.data = value
        if self._shards is not None:
            self._shards.drop(self._numbers[id(param)])

    def own_class(self, param: nn.Parameter) -> type:
        return self._own[self._numbers[id(param)]]

    def stamp(self, param: nn.Parameter) -> object:
        return self._stamps[self._numbers[id(param)]]

    def whole(self, param: nn.Parameter, why: str) -> torch.Tensor:
        number = self.check_open(param)
        if not self.life.running and not self._warned:
            self._warned = True
            logging.getLogger("zcomm").warning(
                "%s: %s gathers the weight whole on each rank (all ranks must do so in the same order); "
                "opt.full_state_dict(), zcomm.zero.full_param(p) and zcomm.zero.GatheredParameters(...) show it in the "
                "program. This is logged once",
                self._names[number],
                why,
            )
        unit = self._store.unit_of(number)
        if self.life.running and unit.is_part:
            text = self.row_weights.warning(param, why) or _NOT_RUNNING % (self._names[number], why, unit.name)
            if not self._warned_part:
                self._warned_part = True
                logging.getLogger("zcomm").warning("%s", text)
        with torch.no_grad(), torch.inference_mode(False):
            unit.reader = f"{why} of " if why == CALL else ""  # so that ranks in different calls are detected
            try:
                return self._store.full(number)
            finally:
                unit.reader = ""

    def use(self, param: nn.Parameter) -> Use:
        return self.hooks.using(self._store.unit_of(self.check_open(param)))

    def use_part(self, param: nn.Parameter) -> Use | None:
        unit = self._store.unit_of(self.check_open(param))
        traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
        in_pass = self.life.running or torch._C._current_graph_task_id() >= 0  # or backward recomputes one
        return self.hooks.using(unit) if unit.is_part and in_pass and not traced else None

    @property
    def in_forward(self) -> bool:
        return self.life.running > 0

    def by_rows(self, param: nn.Parameter) -> Rows | None:
        return self.row_weights.of(param)

    def edit(self, param: nn.Parameter, act: Act, overwrites: bool = False) -> None:
        if self.closed and overwrites:
            placeholder = self.placeholder(param)
            value = torch.empty(placeholder.shape, dtype=placeholder.dtype, device=placeholder.device)
            act(value.view(-1), slice(0, value.numel()))
            self.revive(param, value)
            return
        number = self.check_open(param)
        assert self._edit is not None
        self.life.before_edit(self._store.unit_of(number), self._names[number])
        self._edit(number, act)
        self._store.after_edit()
        self._stamps[number] += 1
        self.edits += 1

    def check_open(self, param: nn.Parameter) -> int:
        number = self._numbers[id(param)]
        if self.closed:
            raise RuntimeError(f"{self._names[number]}: {_CLOSED}{_KEPT if self.kept(param) is not None else ''}")
        return number
