"""Stage 3 by units: parameters live as shards; a unit is whole only around its use.

[Note: unit life] Every unit has fixed addresses in a reserved range and no memory behind them. ``ensure`` gathers it:
a slot of a small ring is filled (each rank brings its shard; a barrier or an all_gather makes it whole) and mapped
behind the unit's addresses, and the parameters become views of them. A unit that is not in use keeps its slot until
another needs it; then its parameters become stand-ins (weights.py). Views that autograd saved in forward point to
the unit's own addresses, so they are right again in backward, where the unit has been gathered anew.

An interrupt may come between any two lines of this. A unit is in ``_changing`` while its state and its memory may
disagree; what an interrupt has left there is SHARDED anew by the next ``ensure``. While the host waits for a gathering
no unit is: it goes on, and is waited for again.

SHARDED -> GATHERING (on the gathering thread) -> GATHERED -> SHARDED. The root unit, and those that are kept, have
slots of their own and stay GATHERED until the step.
After a step every unit is SHARDED again, because its weights have changed.

All ranks must use their units in the same order; the gathers' names are compared, so that ranks which run different
modules get an error that names both units. Prefetch follows the order seen in the last pass.
Thread rule: hooks and methods on the main thread; ``_gather`` on one gathering thread, with a communicator of its own.
Source: ZeRO stage 3 (arXiv:1910.02054), prefetch of ZeRO-Infinity (arXiv:2104.07857).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import psutil
import torch
from torch import nn

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import tensor_of
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.unit_policy import UnitChoice
from zcomm.zero.options import ahead_of, slot_count
from zcomm.zero.params.shards import ShardSource
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.units.prefetch import UseOrder
from zcomm.zero.units.slot import Slot
from zcomm.zero.units.unit import Unit, UnitState
from zcomm.zero.units.weights import UnitWeights
from zcomm.zero.worker import Worker

IN_STEP = (
    "stage 3 by units: all ranks must run the same modules in the same order; what differs between ranks (generate(), "
    "evaluation) goes inside of zcomm.zero.GatheredParameters(model); what reads whole weights (state_dict(), "
    "p.norm()) runs on all ranks"
)


ROOM = 0.8  # of free memory that weights may take in close()


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


class UnitStore(ParameterStore):
    """Sharded parameters, gathered unit by unit.

    choices: of the units, in the numbering of ``geometry.unit_buckets``; unit 0 is the root.
    shared: the ranks share the slots (CPU ranks of a host): a gather moves this rank's shard only.
    prefetch: units gathered ahead, or prefetch_nbytes: their bytes. Slots: so many + 2 of the largest unit, one for
    each unit that is kept, and another one each time that more units are in use at once than there are slots.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        geometry: Geometry,
        comm: Communicator,
        dtype: torch.dtype,
        tiers: Sequence[str],
        choices: Sequence[UnitChoice],
        source: ShardSource,
        shared: bool,
        prefetch: int,
        prefetch_nbytes: int | None = None,
    ) -> None:
        super().__init__(params, geometry, comm, dtype, tiers)
        self._source = source
        self._shared = shared
        self._prefetch = (prefetch, prefetch_nbytes)
        self._gather_comm = comm.duplicate()
        self._thread = Worker("zcomm-gather")
        self.weights = UnitWeights(self, params, [place.shape for place in geometry.places])
        self.units = self._lay_out(choices)
        self._sizes = [unit.nbytes for unit in self.units]
        self._make_slots()
        self._clock = 0
        self.held: set[int] = set()  # by id(): parameters that are whole copies now
        self.running = 0  # forwards of modules that run now
        self._changing: dict[int, Unit] = {}  # by number
        self._in_use: Unit | None = None  # prefetch must not take its slot
        self._order = UseOrder()
        self._in_pass = False  # between the first forward of a step and the step itself

    def start_thread(self) -> None:
        """Start the gathering thread now, so that an interrupt cannot come as it starts."""
        self._thread.submit(int).result()

    # --- memory -----------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        """Device of whole units."""
        return torch.device("cpu")

    def _lay_out(self, choices: Sequence[UnitChoice]) -> list[Unit]:
        units: list[Unit] = []
        for index, choice in enumerate(choices):
            buckets = [self._geometry.every[b] for b in self._geometry.unit_buckets[index]]
            nbytes = sum(bucket.count for bucket in buckets) * self._dtype.itemsize
            units.append(Unit(index, choice, buckets, _rounded_up(nbytes, _core.page_nbytes())))
        self._slot_nbytes = max((unit.nbytes for unit in units if not unit.keep), default=0)
        table = _core.table_nbytes()  # at multiples of it slots are shown and hidden fastest; addresses cost nothing
        rooms = [_rounded_up(unit.nbytes if unit.keep else self._slot_nbytes, table) for unit in units]
        *offsets, end = accumulate(rooms, initial=0)
        for unit, offset in zip(units, offsets, strict=True):
            unit.offset = offset
        self._range = _core.AddressRange(max(end, table))
        return units

    def _make_slots(self) -> None:
        kept, blocks = [u for u in self.units if u.keep], [u.nbytes for u in self.units if not u.keep]
        count = slot_count(blocks, *self._prefetch)
        begins = list(accumulate((unit.nbytes for unit in kept), initial=count * self._slot_nbytes))
        memory = self._allocate(begins[-1])
        self._memories = [memory]
        self._slots = [Slot(memory, number * self._slot_nbytes, self._slot_nbytes) for number in range(count)]
        for unit, begin in zip(kept, begins, strict=False):
            unit.own = Slot(memory, begin, unit.nbytes)
        self._free = list(range(count))
        for unit in self.units:
            flat = tensor_of(self._range.memory(unit.offset, unit.nbytes), self._dtype)
            unit.span = (flat.data_ptr(), flat.data_ptr() + unit.nbytes)
            for bucket, begin in self._bucket_begins(unit):
                for param in bucket.params:
                    view = self._geometry.view(flat[begin : begin + bucket.count], param)
                    unit.views.append((self._params[param], view))

    @staticmethod
    def _bucket_begins(unit: Unit) -> Iterator[tuple[FlatBucket, int]]:
        begin = 0
        for bucket in unit.buckets:
            yield bucket, begin
            begin += bucket.count

    def _allocate(self, nbytes: int) -> Any:
        core = self._gather_comm._core
        return core.allocate_shared(nbytes) if self._shared else core.allocate(nbytes)

    def _slot(self, unit: Unit) -> Slot:
        return unit.own or self._slots[unit.slot]

    def _add_slot(self) -> None:
        """For models that use more units at the same time than slots: as all ranks do, in the order of the gathers."""
        memory = self._thread.submit(self._allocate, self._slot_nbytes).result()
        self._memories.append(memory)
        self._slots.append(Slot(memory, 0, self._slot_nbytes))
        self._free.append(len(self._slots) - 1)

    def _kept(self, bucket: FlatBucket) -> int:
        return bucket.shard_count

    @property
    def gives_way(self) -> bool:
        """Whether a unit may lose its memory to another one within a step."""
        return len(self._slots) < sum(not unit.keep for unit in self.units)

    @property
    def slot_nbytes(self) -> int:
        ring: int = sum(memory.nbytes for memory in self._memories)
        return ring // self._comm.local_world_size if self._shared else ring

    @property
    def window_nbytes(self) -> int:
        return self._source.window_nbytes

    # --- gathering --------------------------------------------------------------------------------------------

    def ensure(self, unit: Unit) -> None:
        """Make ``unit`` whole. Collective, unless it is whole already."""
        if self._changing:
            self._recover()
        self._clock += 1
        unit.last_use = self._clock
        if self._is_there(unit):
            return
        if unit.state is UnitState.SHARDED and not self._start(unit):
            self._add_slot()
            self._start(unit)
        try:
            self._join(unit)
        except (_core.CollectiveMismatch, TimeoutError) as error:
            error.args = (f"{error}; {IN_STEP}",)
            raise
        self._slot(unit).show(self._range, unit.offset)
        unit.state = UnitState.GATHERED
        self._changing.pop(unit.index, None)

    def _join(self, unit: Unit) -> None:
        """Wait for the gathering of the unit, which is in ``_changing`` then. One that failed leaves it there."""
        gathering = unit.gathering
        assert gathering is not None
        start = time.perf_counter()
        try:
            gathering.result()
        finally:
            self.waited_s += time.perf_counter() - start
            if gathering.done():  # else this thread was interrupted, and the gathering goes on
                self._changing[unit.index] = unit
                unit.gathering = None
            del gathering  # its error has this frame: together they would keep everything alive

    def _is_there(self, unit: Unit) -> bool:
        """Return True if ``ensure`` has nothing to do. What was gathered before an edit is given up here, where it
        comes again at once: graphs that are alive may have views of it."""
        if unit.state is UnitState.GATHERED and unit.stale:
            self._drop(unit)
        return unit.state is UnitState.GATHERED or self._is_held(unit)

    def _is_held(self, unit: Unit) -> bool:
        """Return True if all parameters of the unit are whole copies: nothing to gather."""
        return bool(self.held) and all(id(param) in self.held for param, _ in unit.views)

    def _recover(self) -> None:
        """Make SHARDED what an interrupt, or an error, has left half done."""
        with suppress(Exception):
            self._thread.submit(int).result()  # and so all that it was given before
        for unit in list(self._changing.values()):
            self._reset(unit)
        self._count_free()
        self._changing.clear()

    def _reset(self, unit: Unit) -> None:
        """Give up all memory that the unit has."""
        self.weights.detach(unit)
        if unit.keep or unit.slot >= 0:
            self._slot(unit).forget(self._range, unit.offset)
        unit.gathering, unit.state, unit.stale, unit.slot = None, UnitState.SHARDED, False, -1

    def _count_free(self) -> None:
        used = {unit.slot for unit in self.units}
        self._free = [number for number in range(len(self._slots)) if number not in used]

    def _start(self, unit: Unit) -> bool:
        self._changing[unit.index] = unit
        if not unit.keep:
            slot = self._take_slot()
            if slot < 0:
                del self._changing[unit.index]
                return False
            unit.slot = slot
        unit.state, unit.edits = UnitState.GATHERING, self.weights.edits
        unit.gathering = self._thread.submit(self._gather, unit)
        del self._changing[unit.index]
        return True

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        idle = [u for u in self.units if u.state is UnitState.GATHERED and u.idle and not u.keep]
        idle = [u for u in idle if u is not self._in_use]
        if not idle:
            return -1
        until = {index: -place for place, index in reversed(list(enumerate(self._order.coming)))}
        # What is needed last, as far as that is known; the oldest among others.
        self._drop(min(idle, key=lambda u: (until.get(u.index, -math.inf), u.last_use)))
        return self._free.pop()

    def _drop(self, unit: Unit) -> None:
        """GATHERED -> SHARDED: the unit's slot goes back to the ring."""
        self._changing[unit.index] = unit
        self.weights.detach(unit)
        self._slot(unit).hide(self._range, unit.offset)
        self._give_back(unit)
        del self._changing[unit.index]

    def _give_back(self, unit: Unit) -> None:
        """The unit is in no slot any more, or what came into it is not whole."""
        unit.state, unit.stale = UnitState.SHARDED, False
        if not unit.keep:
            self._free.append(unit.slot)
            unit.slot = -1

    def _gather(self, unit: Unit) -> None:
        """On the gathering thread: fill the unit's slot."""
        if not unit.buckets:
            return
        flat = self._slot(unit).flat(unit.nbytes, self._dtype)
        self._fill(unit, unit.buckets, [flat[at : at + bucket.count] for bucket, at in self._bucket_begins(unit)])

    def _fill(self, unit: Unit, buckets: Sequence[FlatBucket], whole: Sequence[torch.Tensor]) -> None:
        """Bring ``buckets`` of the unit into ``whole``, memory of a slot. Collective."""
        name = f"unit {unit.name}"
        if unit.edits:  # ranks that edit differently are found out
            name += f" after {unit.edits} changes of weights by the program"
        if self._shared:
            # No rank may still use what was in the slot.
            self._gather_comm.barrier(name=f"slot for {name}")
        shards = [w[bucket.shard(self._comm.rank)] for bucket, w in zip(buckets, whole, strict=True)]
        for work in [self._source.fetch(b, shard) for b, shard in zip(buckets, shards, strict=True)]:
            if work is not None:
                work.wait()
        if self._shared:
            self._gather_comm.barrier(name=name)
        else:
            self._gather_comm.all_gather(shards, out=whole, name=name)

    # --- what the hooks call ----------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """The model's forward begins: remember the order of the last pass, start a new one."""
        self._order.begin(in_model=True)
        self._in_pass = True
        self.take_back(self.units[:1])
        self.ensure(self.units[0])
        self._attach(self.units[0])

    def _attach(self, unit: Unit) -> None:
        if not unit.attached and unit.state is UnitState.GATHERED:
            self.weights.attach(unit)

    def end_forward(self) -> None:
        """The model's forward has ended."""
        self._order.leave_model()

    def settle_use(self, unit: Unit) -> None:
        """Make the unit's parameters ordinary ones when a use has begun, and stand-ins when it has ended."""
        if unit.shown is unit.idle or unit.parted:
            if unit.idle:
                self.weights.hide(unit)
            elif unit.attached or self._is_held(unit):
                self.weights.show(unit)

    def reached(self, unit: Unit, param: nn.Parameter) -> None:
        """The gradient of ``param`` is there: what hooks of the program do to it now is not for the gathered copy."""
        if not unit.in_forward and id(param) not in self.held:
            self.weights.hide_one(param)
            unit.parted = True

    def use(self, unit: Unit) -> None:
        """A module of ``unit`` is about to run, forward or backward."""
        self._in_pass = True
        self.take_back([unit])
        self.ensure(unit)
        self._attach(unit)
        if unit.index == 0 or self.held:
            return  # while parameters are open, forwards say nothing of the training's order
        self._order.use(unit.index)
        self._in_use = unit
        for index in ahead_of(self._order.coming, self._sizes, *self._prefetch):
            if self.units[index].state is UnitState.SHARDED:
                self._start(self.units[index])
        self._in_use = None

    def place_of(self, unit: Unit) -> object:
        """Where views that autograd saves now will look for the unit's parameters; None: it always is the same."""
        return None

    def return_to(self, unit: Unit, place: object) -> None:
        """Backward is about to use such views: ``use`` shall gather the unit there. place: from ``place_of``."""

    def invalidate(self) -> None:
        """The weights have changed: every unit is SHARDED again."""
        if self._changing:
            self._recover()
        self._in_pass, self.running, self._in_use = False, 0, None
        self._order.end()
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                self.ensure(unit)
            unit.in_forward, unit.in_backward, unit.surrounds = 0, False, False
            self.settle_use(unit)
            if unit.state is UnitState.GATHERED:
                self._drop(unit)

    # --- ParameterStore ---------------------------------------------------------------------------------------

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._source.begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._source.commit(bucket, weight)
        for index in bucket.params:
            self.weights.start(index, self._dtype, self._device)

    def sweep(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        self.invalidate()
        return self._source.sweep(reverse)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._source.load(bucket)

    def save(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._source.commit(bucket, weight)

    def renew(self) -> None:
        self.invalidate()
        self._source.renew()

    def spread(self) -> None:
        self.invalidate()  # the next gather brings the new shards

    def count_change(self) -> None:
        self.weights.changed()

    def adopt(self, param: int, value: torch.Tensor) -> None:
        self._params[param].data = value

    def detached(self) -> Iterator[int]:
        self.take_back(self.units)
        return iter(())

    def take_back(self, units: Sequence[Unit]) -> None:
        """Make parameters that the program has converted to another dtype, and swapped ones of ``units``, the store's
        again, or raise."""
        if self.weights.aside:
            self.weights.take_back()
        self.weights.take_swapped(units)

    @property
    def alone(self) -> bool:
        return bool(self._comm.world_size == 1)

    def before_edit(self, unit: Unit, name: str) -> None:
        """Prepare for a change of this rank's elements of the parameter ``name``, outside of a step."""
        if not unit.idle:
            raise RuntimeError(
                f"{name}: a weight of stage 3 by units cannot be changed while its module runs forward or backward: "
                "change it between passes"
            )
        if unit.state is UnitState.GATHERING:
            self.ensure(unit)
        unit.stale = unit.state is UnitState.GATHERED

    def after_edit(self) -> None:
        """Do what follows such a change: nothing here."""

    def unit_of(self, param: int) -> Unit:
        return self.units[self._geometry.bucket_of(param).unit]

    def full(self, param: int) -> torch.Tensor:
        unit, whole = self.unit_of(param), self._params[param]
        if id(whole) in self.held:
            return whole.detach().clone()
        if self.running:
            self.use(unit)  # it comes again in the next pass
        else:
            self.ensure(unit)
        return next(view for other, view in unit.views if other is whole).clone()

    def hold(self, param: int) -> None:
        if param not in self._holds:
            whole = self.full(param)
            self.weights.hold(param)
            self._params[param].data = whole
            self.held.add(id(self._params[param]))
        self._holds[param] = self._holds.get(param, 0) + 1

    def release(self, param: int) -> None:
        held = self._holds.pop(param) - 1
        if held:
            self._holds[param] = held
            return
        self.held.discard(id(self._params[param]))
        own = self._own(param)
        with torch._C.DisableTorchFunctionSubclass():
            self._params[param].data = own

    def _own(self, param: int) -> torch.Tensor:
        return self.weights.release(param, self.unit_of(param))

    def is_waiting(self) -> bool:
        return any(unit.gathering is not None and not unit.gathering.done() for unit in self.units)

    def give_up(self) -> None:
        self._gather_comm.close()

    def close(self) -> None:
        self._thread.close()
        values = self._last_values()
        for unit in self.units:
            unit.gathering = None
            if unit.state is UnitState.GATHERED:
                self._drop(unit)
            unit.own = None
        self.weights.close(values)
        self._source.close()
        self._gather_comm.close()
        self._memories.clear()  # nothing gathers after close()
        self._slots.clear()

    def _last_values(self) -> dict[int, torch.Tensor]:
        """Return the whole parameters by number, if this rank can read them and memory has room; else none."""
        values: dict[int, torch.Tensor] = {}
        need = self._geometry.every_count * self._dtype.itemsize
        if not self.keeps_weights or need > ROOM * free_nbytes(self._device):
            return values
        with torch.no_grad():
            try:
                for bucket in self._geometry.every:
                    whole = self._source.load(bucket) if self._comm.world_size == 1 else self._source.whole(bucket)
                    if whole is None or (self._comm.world_size > 1 and self.weights.edits):
                        return {}
                    for index in bucket.params:
                        view = self._geometry.view(whole, index)
                        values[index] = torch.empty(view.shape, dtype=view.dtype, device=self._device).copy_(view)
            except Exception as error:
                logging.getLogger("zcomm").warning("close(): the weights cannot be kept: %s", error)
                return {}
        return values


def free_nbytes(device: torch.device) -> int:
    """Return the bytes that an allocation on ``device`` finds free. A CUDA device counts what torch has cached as
    used."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
