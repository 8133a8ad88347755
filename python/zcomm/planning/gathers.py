"""Gathers of a step: bytes of parameters that a rank reads on the drive for forward, backward and recomputation.

[Note: planned gathers] A micro-batch is traced on the meta device under the hooks of training (UnitHooks). The trace
has the units in the order of their uses, and the moments when they are idle again. Recomputation is in the trace,
because the block's forward runs again in backward. Then UnitManager replays these uses, step after step, with slots
that have no memory. So ring, prefetch and read-ahead are the same as in training, and a unit that is still in its slot
is not read again.
Weights by rows have no slots: each of their uses reads them. An embedding reads only blocks with tokens, but all blocks
are counted. Uses of a weight outside its module are not traced.
Planning needs no ranks and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from zcomm.planning.work import check_untrained, run_backward
from zcomm.zero.cache.span_cache import whole_pages
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.layout.unit_policy import tensors_in
from zcomm.zero.memory.plan import Settings, lay_out
from zcomm.zero.options import Units, as_offload, as_precision
from zcomm.zero.params.shards import SwapSource
from zcomm.zero.rows.blocks import row_blocks
from zcomm.zero.units.hooks import UnitHooks
from zcomm.zero.units.life import UnitManager
from zcomm.zero.units.memory import UnitPlan, UnitPool
from zcomm.zero.units.slot_ring import SlotRing, ring_sizes
from zcomm.zero.units.unit import Unit, UnitState
from zcomm.zero.update_hooks import UpdateHooks

Use = tuple[str, int]  # one of the constants below, and a unit
BEGIN, END, USE, BUSY, IDLE, ROWS = "begin", "end", "use", "busy", "idle", "rows"
_STEPS = 3  # the first step learns the order of uses, and the second step may add slots
_MICRO_STEPS = 3  # number of replayed micro-steps: later ones equal the last


def gathered_nbytes(
    model: nn.Module, settings: Settings, inputs: Any, update: str, accumulation: int = 1
) -> int | None:
    """Return the bytes of parameters that the gathers of a step read on the drive, of one rank in the steady state.
    None: the model's output has no tensor that backward could begin with.

    inputs: of a micro-batch; see ``as_arguments``. Model and inputs are on one device, which may be meta. update: as
    of Offload, not "auto". Raises: the model's errors.
    """
    sections, geometry = lay_out(model, settings)
    if not sections.by_unit:
        return 0
    choices, item, ahead = sections.choices, settings.precision.param_nbytes, settings.units.prefetch_nbytes
    sizes = [whole_pages(sum(geometry.every[b].count for b in buckets) * item) for buckets in geometry.unit_buckets]
    positional, named = as_arguments(inputs)
    ring = SlotRing(ring_sizes(_units(choices, sizes), settings.prefetch, ahead))
    uses = trace(model, choices, ring, positional, named)
    if uses is None:
        return None
    gathers = count_gathers(uses, choices, sizes, settings.prefetch, ahead, accumulation, update != "forward")
    total = 0
    for unit, (choice, count) in enumerate(zip(choices, gathers, strict=True)):
        buckets = [geometry.every[bucket] for bucket in geometry.unit_buckets[unit]]
        once = sum(b.shard_count for b in buckets if sections.list[b.section].weights == "nvme") * item
        if not choice.by_rows or not once:
            total += count * once
            continue
        count = count or 2 * accumulation * choice.uses  # linear_cross_entropy takes them without the module
        first = once if update == "forward" and sections.list[buckets[0].section].trained else None  # from its update
        again = _rows_nbytes(geometry, unit, settings.precision.dtype)
        total += count * again if first is None else first + (count - 1) * again
    return total


def gathered_count(
    model: nn.Module,
    inputs: Any,
    world_size: int,
    precision: str = "fp32",
    *,
    bucket_mb: float = 25.0,
    prefetch: int = 1,
    accumulation: int = 1,
    units: Units | None = None,
) -> int | None:
    """Return the elements that ``world_size`` ranks gather together in a step of stage 3 by units, padding included.

    None: as ``gathered_nbytes``. Weights in memory are gathered as those on a drive. Raises: as ``gathered_nbytes``.
    """
    kind = as_precision(precision)
    form = TileForm((), kind.dtype, torch.float32)
    where = as_offload("nvme", 3)
    settings = Settings(3, where, world_size, kind, form, bucket_mb, prefetch, units or Units(), shared=False)
    nbytes = gathered_nbytes(model, settings, inputs, "step", accumulation)
    return None if nbytes is None else world_size * nbytes // kind.param_nbytes


def as_arguments(inputs: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of ``inputs``: a dict by name, a tuple or list by position, any other value as the only
    argument."""
    if isinstance(inputs, dict):
        return (), inputs
    return (inputs if isinstance(inputs, (tuple, list)) else (inputs,)), {}


# --- the trace ------------------------------------------------------------------------------------------------------


class _Recorder:
    """Stands for UnitManager, its memory and its weights in UnitHooks, and records their calls."""

    def __init__(self, units: Sequence[Unit], gives_way: bool) -> None:
        self.units, self.gives_way = units, gives_way
        self.memory = self.weights = self
        self.hooks: Any = None
        self.running = 0
        self.uses: list[Use] = []

    def begin_pass(self) -> None:
        self.uses.append((BEGIN, 0))

    def end_forward(self) -> None:
        self.uses.append((END, 0))

    def use(self, unit: Unit) -> None:
        self.uses.append((USE, unit.index))

    def show_or_hide(self, unit: Unit) -> None:
        self.uses.append((IDLE if unit.idle else BUSY, unit.index))

    def rows(self, unit: Unit) -> None:
        self.uses.append((ROWS, unit.index))

    def reached(self, unit: Unit, param: nn.Parameter) -> None: ...

    def slot_of(self, unit: Unit) -> None: ...

    def return_to(self, unit: Unit, slot: object) -> None: ...

    def has(self, param: nn.Parameter) -> bool:
        return True  # so that UnitHooks leaves newly registered parameters unchanged


def trace(
    model: nn.Module,
    choices: Sequence[UnitChoice],
    ring: SlotRing,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> list[Use] | None:
    """Return the uses of units in forward of ``model(*args, **kwargs)``, and in backward from its floating outputs.
    None: it has no floating outputs.

    Gradients of the model are restored; on another device than meta, buffers and random generators are not.
    Raises: ValueError for a model that an optimizer trains; the model's errors.
    """
    check_untrained(model)
    units = [Unit(number, choice, (), 0) for number, choice in enumerate(choices)]
    for unit, choice in zip(units, choices, strict=True):
        unit.views = [(param, param) for param in choice.params]
    recorder = _Recorder(units, ring.gives_way(units))
    hooks = UnitHooks(model, list(choices), cast(UnitManager, recorder))
    hooks.handles += [
        handle for unit in units if unit.by_rows for handle in _row_hooks(model, unit, choices[unit.index], recorder)
    ]
    try:
        with torch.enable_grad(), _own_gradients(model):
            ran = run_backward(model(*args, **(kwargs or {})))
    finally:
        hooks.remove()
    return recorder.uses if ran else None


def _row_hooks(model: nn.Module, unit: Unit, choice: UnitChoice, recorder: _Recorder) -> Iterator[Any]:
    """Register hooks on the modules of a weight by rows. Backward of a Linear reads the weight for the gradient of the
    inputs; backward of an embedding does not."""

    def enter(module: nn.Module, args: Any) -> None:
        recorder.rows(unit)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if any(tensor.requires_grad for tensor in tensors_in(args)):
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda grad: recorder.rows(unit))

    for module in model.modules():
        if any(param is choice.params[0] for param in module.parameters(recurse=False)):
            yield module.register_forward_pre_hook(enter)
            if not isinstance(module, nn.Embedding):
                yield module.register_forward_hook(leave)


@contextmanager
def _own_gradients(model: nn.Module) -> Iterator[None]:
    before = [(param, param.grad) for param in model.parameters()]
    for param, _ in before:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in before:
            param.grad = grad


# --- the replay -----------------------------------------------------------------------------------------------------


class _Slots(UnitPool):
    """Slots without memory. gathers: of each unit since the last ``clear``."""

    device = torch.device("cpu")

    def __init__(self, units: list[Unit], ring: SlotRing) -> None:
        self.units, self._ring = units, ring
        self.gathers = [0] * len(units)

    def take(self, unit: Unit, must: bool) -> bool:
        return unit.keep or self._ring.take(unit, self.units, self.owner)

    def add(self, unit: Unit) -> None:
        self._ring.add(unit.nbytes)

    def fill(self, unit: Unit) -> None:
        self.gathers[unit.index] += 1

    def wait(self, unit: Unit) -> None: ...

    def map(self, unit: Unit) -> None: ...

    def give_back(self, unit: Unit) -> None:
        unit.state = UnitState.SHARDED
        if not unit.keep:
            self._ring.give_back(unit)

    def reset(self, unit: Unit) -> None: ...

    def count_free(self) -> None: ...

    @property
    def gives_way(self) -> bool:
        return self._ring.gives_way(self.units)

    @property
    def slot_nbytes(self) -> int:
        return 0

    def close(self) -> None: ...


class _Weights:
    """UnitWeights without parameters."""

    edits = 0

    def take_back(self, units: Sequence[Unit]) -> None: ...

    def attach(self, unit: Unit) -> None: ...

    detach = make_plain = make_stand_ins = attach


def count_gathers(
    uses: Sequence[Use],
    choices: Sequence[UnitChoice],
    sizes: Sequence[int],
    prefetch: int = 1,
    prefetch_nbytes: int | None = None,
    accumulation: int = 1,
    reads_ahead: bool = True,
) -> list[int]:
    """Return the number of gathers of each unit in a step, in the steady state.

    uses: of a micro-step, from ``trace``. choices, sizes: of the units, with bytes in multiples of pages; unit 0 is the
    root. prefetch, prefetch_nbytes: as of ZeroOptimizer and Units. reads_ahead: the end of a step starts to gather the
    first units of the next.
    """
    none: Any = None
    units = _units(choices, sizes)
    memory = _Slots(units, SlotRing(ring_sizes(units, prefetch, prefetch_nbytes)))
    plan = UnitPlan((), none, none, torch.float32, choices, prefetch, prefetch_nbytes)
    life = UnitManager(plan, memory, none, cast(Any, _Weights()), UpdateHooks())
    replayed, found = min(accumulation, _MICRO_STEPS), [0] * len(units)
    with torch.enable_grad():
        for _ in range(_STEPS):
            found = [0] * len(units)
            for micro_step in range(replayed):
                _replay(life, uses, memory)
                times = 1 + (accumulation - replayed) * (micro_step + 1 == replayed)
                found = [sum_ + times * count for sum_, count in zip(found, memory.gathers, strict=True)]
                memory.gathers = [0] * len(units)
            life.invalidate()
            if reads_ahead:
                life.read_ahead()
    return found


def _replay(life: UnitManager, uses: Sequence[Use], memory: _Slots) -> None:
    for word, index in uses:
        unit = life.units[index]
        if word == BEGIN:
            life.begin_pass()
        elif word == END:
            life.end_forward()
        elif word == USE:
            life.use(unit)
        elif word == ROWS:
            memory.gathers[index] += 1
        else:
            unit.in_forward = int(word == BUSY)


def _units(choices: Sequence[UnitChoice], sizes: Sequence[int]) -> list[Unit]:
    sized = enumerate(zip(choices, sizes, strict=True))
    return [Unit(number, choice, (), nbytes) for number, (choice, nbytes) in sized]


def _rows_nbytes(geometry: Geometry, unit: int, dtype: torch.dtype) -> int:
    """Return the bytes that rank 0 reads for all blocks of a weight by rows: of each its keys, whole."""
    (param, *_) = geometry.every[geometry.unit_buckets[unit][0]].params
    shape, count = geometry.places[param].shape, 0
    for begin, end in row_blocks(shape[0]):
        for span in geometry.spans(param):
            bucket, at = geometry.every[span.bucket], span.offset - span.begin
            low = max(begin * shape[1], span.begin) + at
            high = min(min(end * shape[1], span.begin + span.count) + at, bucket.shard_count)
            keys = (key for _, key in SwapSource.spans(bucket, dtype))
            count += sum(key.stop - key.start for key in keys if max(key.start, low) < min(key.stop, high))
    return count * dtype.itemsize
