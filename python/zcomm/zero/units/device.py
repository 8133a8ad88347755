"""Stage 3 on a device: units are whole in a ring of places there, and come from host memory or a swap file.

[Note: places on a device] Views that autograd saved in forward must be right again in backward, so a unit always comes
to the same place: unit number i to place i % (prefetch + 1), the root and those that are kept to places of their own.
In forward and backward order the next ``prefetch`` units are then in other places than the one in use. A unit whose
place is in use by another one (modules that use each other's parameters) gets a place of its own, and keeps it from the
next step on; what it did in its old one before is undone there in backward (``place_of``, ``return_to``).
A place has two events: ``came`` on the lane's ``h2d`` stream, for which torch's stream waits before it uses the unit,
and ``left`` on torch's stream, where the unit was dropped, for which the next copy into the place waits. Dropping and
gathering make the host wait for nothing.
Where a unit comes from: host memory that has it whole (world of one, or the one copy of the host's ranks: no gather at
all, ranks may use their units in any order); else each rank brings its shard, from memory or the swap file, into a slot
of host memory on the gathering thread, as on the CPU, and the slot is copied.
Thread rule: as UnitStore.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.unit_policy import UnitChoice
from zcomm.zero.options import slot_count
from zcomm.zero.params.shards import ShardSource
from zcomm.zero.units.store import UnitStore
from zcomm.zero.units.unit import Unit, UnitState


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)


HOST_SLOTS = 2  # units on their way from a swap file or from other ranks' memory


class Place:
    """Device memory for one unit at a time."""

    def __init__(self, flat: torch.Tensor, lane: DeviceLane) -> None:
        self.flat = flat
        self.came = lane.event()
        self.left = lane.recorded(lane.event())  # the memory's last owner, in the order of torch's stream
        self.holder: Unit | None = None


class DeviceUnitStore(UnitStore):
    """See [Note: places on a device]. Memory: prefetch + 1 places of the largest unit and one for each that is kept, on
    the device; host slots of the largest unit, if units are gathered."""

    _home = "cpu"  # the tier of shards that are not offloaded

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
        *,
        lane: DeviceLane,
    ) -> None:
        self._lane = lane
        self._used: set[int] = set()  # units that were whole since the last step
        self._editing = False  # the program has changed weights since the last gather
        self._annexes: dict[int, Place] = {}  # by number of the unit: places made by _move
        super().__init__(params, geometry, comm, dtype, tiers, choices, source, shared, prefetch, prefetch_nbytes)
        here = [bucket for unit in self.units for bucket, _ in self._from_host(unit)]
        self._whole_here = bool(here) and all(source.whole(bucket) is not None for bucket in here)

    # --- memory -----------------------------------------------------------------------------------------------

    @property
    def _device(self) -> torch.device:
        return self._lane.device

    def _lay_out(self, choices: Sequence[UnitChoice]) -> list[Unit]:
        units = []
        for index, choice in enumerate(choices):
            buckets = [self._geometry.every[b] for b in self._geometry.unit_buckets[index]]
            units.append(Unit(index, choice, buckets, sum(b.count for b in buckets) * self._dtype.itemsize))
        return units

    def _make_slots(self) -> None:
        blocks = [unit for unit in self.units if not unit.keep]
        sizes = [unit.nbytes for unit in blocks]
        count = max(min(slot_count(sizes, *self._prefetch) - 1, len(blocks)), min(1, len(blocks)))
        ring = [self._ring_place(max(sizes)) for _ in range(count)]
        self._places = {unit.index: ring[number % count] for number, unit in enumerate(blocks)}
        self._places |= {unit.index: self._ring_place(unit.nbytes) for unit in self.units if unit.keep}
        self._all_places = list({id(place): place for place in self._places.values()}.values())
        for unit in self.units:
            self._point(unit)
        self._make_host_slots()

    def _make_host_slots(self) -> None:
        """For units that come by way of host memory that is not theirs."""
        self._memories, self._host_slots = [], []
        partly = [u for u in self.units if any(self._source.whole(bucket) is None for bucket, _ in self._from_host(u))]
        if partly:
            counts = [sum(bucket.count for bucket, _ in self._from_host(unit)) for unit in self.units]
            nbytes = max(counts) * self._dtype.itemsize
            self._memories = [self._allocate(nbytes) for _ in range(HOST_SLOTS)]
            flats = [tensor_of(memory, self._dtype) for memory in self._memories]
            self._host_slots = [(self._lane.lock(flat), self._lane.event()) for flat in flats]
        self._gathers = 0

    def _ring_place(self, nbytes: int) -> Place:
        """One that is there from the beginning. Collective where ranks reach each other's."""
        return self._add_place(nbytes)

    def _add_place(self, nbytes: int) -> Place:
        count = nbytes // self._dtype.itemsize
        return Place(self._lane.empty(count, self._dtype, "a unit's parameters"), self._lane)

    def _point(self, unit: Unit) -> None:
        """The unit's views are those of its place."""
        flat = self._places[unit.index].flat
        unit.span = (flat.data_ptr(), flat.data_ptr() + unit.nbytes)
        unit.views = [
            (self._params[param], self._geometry.view(flat[begin : begin + bucket.count], param))
            for bucket, begin in self._bucket_begins(unit)
            for param in bucket.params
        ]

    def _from_host(self, unit: Unit) -> list[tuple[FlatBucket, int]]:
        """The buckets that come to the unit's place from host memory or a swap file, and where they begin there."""
        return list(self._bucket_begins(unit))

    @property
    def gives_way(self) -> bool:
        return len(self._all_places) < len(self.units)

    @property
    def slot_nbytes(self) -> int:
        return sum(place.flat.nbytes for place in self._all_places)

    @property
    def window_nbytes(self) -> int:
        host = sum(flat.nbytes for flat, _ in self._host_slots)
        return self._source.window_nbytes + (host // self._comm.local_world_size if self._shared else host)

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        tiers = super().nbytes_by_tier
        rest = tiers.pop("device", 0)
        return {**tiers, self._home: tiers.get(self._home, 0) + rest}

    # --- gathering --------------------------------------------------------------------------------------------

    def ensure(self, unit: Unit) -> None:
        self._clock += 1
        unit.last_use = self._clock
        if self._changing:
            self._recover()
        self._end_edits()
        if self._is_there(unit):
            return
        if unit.state is UnitState.SHARDED and not self._start(unit, must=True):
            self._move(unit)
            self._start(unit, must=True)
        self._await(unit)
        self._changing[unit.index] = unit
        unit.state = UnitState.GATHERED
        self._used.add(unit.index)
        self._changing.pop(unit.index, None)

    def _await(self, unit: Unit) -> None:
        """The host waits for other ranks and the drive only, torch's stream for the copies."""
        if not unit.asked:  # and not even that came to its end
            self._abandon(unit)
            raise RuntimeError(f"gathering unit {unit.name} was interrupted; run the pass again")
        if unit.gathering is not None:
            self._join(unit)
        self._lane.current().wait(self._places[unit.index].came)

    def _start(self, unit: Unit, must: bool = False) -> bool:
        """must: a prefetched unit, not yet used, gives way."""
        place = self._places[unit.index]
        if not self._vacate(place, unit, must):
            return False
        self._changing[unit.index] = unit
        place.holder = unit
        unit.state, unit.asked = UnitState.GATHERING, False
        with torch._C._DisableFuncTorch():  # inside of torch.func.grad new tensors would have no address
            self._fill_place(unit, place)
        unit.asked = True
        del self._changing[unit.index]
        return True

    def _reset(self, unit: Unit) -> None:
        place = self._places[unit.index]
        self.weights.detach(unit)
        unit.gathering = None
        self._lane.current().wait(place.came)
        if place.holder is unit or place.holder is None:
            self._give_back(unit)
        unit.state, unit.stale = UnitState.SHARDED, False

    def _count_free(self) -> None:
        for place in self._all_places:
            holder = place.holder
            if holder is not None and holder.state is UnitState.SHARDED:
                place.holder = None

    def _abandon(self, unit: Unit) -> None:
        """Filling its place was broken off: what had begun of it comes to its end, and counts for nothing."""
        with suppress(Exception):
            self._thread.submit(int).result()  # and so all that it was given before
        unit.gathering = None
        self._lane.current().wait(self._places[unit.index].came)
        self._give_back(unit)

    def _fill_place(self, unit: Unit, place: Place) -> None:
        """Start to bring the unit into its place."""
        if self._whole_here:
            self._copy(unit, list(self._wholes(unit)), place)
        else:
            unit.edits = self.weights.edits
            unit.gathering = self._thread.submit(self._gather_to, unit, place)

    def _vacate(self, place: Place, unit: Unit, must: bool) -> bool:
        """Make sure that nobody but ``unit`` is in the place; False: another one is in use there."""
        other = place.holder
        if other is None or other is unit:
            return True
        if other is self._in_use or (not other.idle and not (must and self._passed(other))):
            return False
        if other.state is UnitState.GATHERING:
            if not must:
                return False
            self._await(other)
        other.in_backward = False  # its hook gathers it again, should backward come back to it
        self._drop(other)
        return True

    @staticmethod
    def _passed(unit: Unit) -> bool:
        """Whether backward has come from the unit to another one: some of its gradients are not there, but nothing of
        its own is left to do, as nothing ran inside of its forward (see hooks.py)."""
        return not unit.in_forward and not unit.surrounds and _in_backward()

    def _move(self, unit: Unit) -> None:
        """Give the unit a place of its own, because another is in use in the one it has."""
        place = self._places[unit.index]
        if unit.index in self._used and _in_backward():  # views of this place are needed now
            raise RuntimeError(
                f"units {unit.name} and {place.holder.name if place.holder is not None else ''} are needed at the same "
                "time in backward, in the same place on the device; another prefetch keeps them apart"
            )
        if unit.index not in self._annexes:
            self._annexes[unit.index] = self._add_place(unit.nbytes)
            self._all_places.append(self._annexes[unit.index])
        self._put(unit, self._annexes[unit.index])

    def _put(self, unit: Unit, place: Place) -> None:
        self._places[unit.index] = place
        self._point(unit)

    def place_of(self, unit: Unit) -> object:
        return self._places[unit.index]

    def return_to(self, unit: Unit, place: object) -> None:
        assert isinstance(place, Place)
        if place is self._places[unit.index]:
            return
        if unit.state is UnitState.GATHERING:
            self._await(unit)
        if unit.state is not UnitState.SHARDED:
            self._drop(unit)
        self._put(unit, place)

    def _drop(self, unit: Unit) -> None:
        self._changing[unit.index] = unit
        self.weights.detach(unit)
        self._give_back(unit)
        del self._changing[unit.index]

    def _give_back(self, unit: Unit) -> None:
        """Its place is free for others once torch's stream has come here."""
        place = self._places[unit.index]
        self._lane.recorded(place.left)
        place.holder = None
        unit.state, unit.stale = UnitState.SHARDED, False

    def _wholes(self, unit: Unit) -> Iterator[torch.Tensor]:
        for bucket, _ in self._from_host(unit):
            whole = self._source.whole(bucket)
            assert whole is not None
            yield whole

    def _copy(self, unit: Unit, wholes: Sequence[torch.Tensor], place: Place, *done: Any) -> None:
        """Host to device, once the place is free."""
        begins = [begin for _, begin in self._from_host(unit)]
        copies = [(place.flat[at : at + w.numel()], w) for at, w in zip(begins, wholes, strict=True)]
        self._lane.h2d.copy(copies, [place.left], place.came, *done)

    def _gather_to(self, unit: Unit, place: Place) -> None:
        """On the gathering thread: fill a host slot, as all ranks do, and copy it."""
        number = self._gathers % HOST_SLOTS
        self._gathers += 1
        flat, copied = self._host_slots[number]
        self._lane.wait(copied)  # before the barrier that says so to others
        buckets = [bucket for bucket, _ in self._from_host(unit)]
        wholes = flat[: sum(bucket.count for bucket in buckets)].split([bucket.count for bucket in buckets])
        if buckets:
            self._fill(unit, buckets, wholes)
        self._copy(unit, wholes, place, copied)

    # --- edits between passes: as in a step, other ranks may still read what is here ----------------------------

    def before_edit(self, unit: Unit, name: str) -> None:
        super().before_edit(unit, name)
        self._lane.wait_for(self._lane.h2d)
        if not self._editing:
            self._editing = True
            if self._comm.world_size > 1:
                self._comm.barrier(name="old weights are unused")

    def _end_edits(self) -> None:
        if self._editing:
            self._editing = False
            if self._whole_here and self._comm.world_size > 1:
                self._comm.barrier(name="parameters after changes by the program")

    # --- ParameterStore ---------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        super().invalidate()
        self._used.clear()  # no graph is alive that has views of them
        for index, place in self._annexes.items():
            self._put(self.units[index], place)

    def spread(self) -> None:
        self._editing = False
        super().spread()
        if self._whole_here and self._comm.world_size > 1:
            self._comm.barrier(name="parameters")

    def settle(self) -> None:
        self.invalidate()
        self._lane.wait_for(self._lane.h2d)

    def close(self) -> None:
        self._thread.close()
        values = self._last_values()
        for unit in self.units:
            unit.gathering = None
            if unit.state is not UnitState.SHARDED:
                self._drop(unit)
        self.weights.close(values)
        self._source.close()
        self._gather_comm.close()
        self._memories.clear()
        self._host_slots.clear()
        self._places.clear()
        self._all_places.clear()
        self._annexes.clear()
        for unit in self.units:
            unit.views, unit.span = [], (0, 0)  # they are memory of the places
