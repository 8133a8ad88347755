"""Units on a device: a ring of slots, which fillers copy units into.

[Note: slots on a device] Views that autograd saved in forward must be valid again in backward, so a unit is always
gathered into the same slot. Unit i uses slot i % (prefetch + 1); the root unit and resident units have slots of their
own. In forward and backward order the next ``prefetch`` units then never need the slot in use. If another unit uses its
slot (modules that use each other's parameters), a unit is assigned a slot of its own, also in later steps. Backward of
a forward that ran in the old slot gathers into that slot again (``slot_of``, ``return_to``).
Copies into slots run on the lane's ``h2d`` stream. Dropping a unit frees its slot by an event, so the
host waits neither for a drop nor for a gather. The fillers (fillers.py) choose a unit's source.
Thread rule: as UnitManager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from zcomm.memory.device_streams import NO_PEERS, DeviceLane, Peers
from zcomm.zero.options import slot_count
from zcomm.zero.rows.reader import DeviceRows
from zcomm.zero.sharded.address_checks import DeviceChecks
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan, UnitPool
from zcomm.zero.units.unit import Unit, UnitState

if TYPE_CHECKING:
    from zcomm.zero.units.unit import Unit


class DeviceSlot:
    """Device memory for one unit at a time.

    ready: recorded on the stream that fills the slot; torch's stream waits for it before it uses the slot. freed:
    recorded on torch's stream after the last use of the slot; the next copy into the slot waits for it.
    """

    def __init__(self, flat: torch.Tensor, lane: DeviceLane) -> None:
        self.flat = flat
        self.ready = lane.event()
        self.freed = lane.recorded(lane.event())  # the memory's last owner, in the order of torch's stream
        self.holder: Unit | None = None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() >= 0)


def _ring(blocks: Sequence[Unit], prefetch: int, prefetch_nbytes: int | None) -> tuple[int, int]:
    """Return the number of equal slots that ``blocks`` share, and the bytes of one."""
    sizes = [unit.nbytes for unit in blocks]
    count = slot_count(sizes, prefetch, prefetch_nbytes) - 1
    return max(min(count, len(blocks)), min(1, len(blocks))), max(sizes, default=0)


def plan_nbytes(units: Sequence[Unit], prefetch: int, prefetch_nbytes: int | None) -> int:
    """Return the bytes of the slots on the device for ``units``, without units by rows."""
    count, largest = _ring([unit for unit in units if unit.in_ring], prefetch, prefetch_nbytes)
    return count * largest + sum(unit.nbytes for unit in units if unit.keep)


class Filler(ABC):
    """Copies a unit's buckets from the host, or from the devices, into its slot.

    shared_whole: the source is host memory that all of the host's ranks change, so a barrier must follow each change.
    """

    shared_whole = False
    waited_s = 0.0  # seconds of waiting for other ranks

    @abstractmethod
    def start(self, unit: Unit, slot: DeviceSlot) -> None:
        """Start to fill the slot as soon as it is free."""

    def wait(self, unit: Unit) -> None:  # noqa: B027
        """Wait for other ranks. After an error no copy is pending."""

    def wait_copied(self, unit: Unit) -> None:  # noqa: B027
        """Wait until no copy of the unit reads this rank's shards."""

    def is_waiting(self) -> bool:
        """Return True if ``close`` would wait for other ranks."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """Leave the other ranks."""

    def cancel(self, unit: Unit) -> None:  # noqa: B027
        """Wait for pending copies of the unit and ignore their errors."""

    @property
    def window_nbytes(self) -> int:
        """Bytes of host memory that copies pass through."""
        return 0

    @property
    def allocation_count(self) -> int:
        return 0

    def close(self) -> None:  # noqa: B027
        """Forget pending copies; free memory."""


class DeviceMemory(UnitPool):
    """Memory of units on a device.

    See [Note: slots on a device]. fillers: set at assembly, in the order in which they start.

    peers: communicator of the ranks' devices, which can read the ring. home: see UnitPool.
    Memory: prefetch + 1 slots of the largest unit, and one for each resident unit.
    """

    on_device = True

    def __init__(
        self, plan: UnitPlan, gather: ShardGather, lane: DeviceLane, home: str, peers: Peers = NO_PEERS
    ) -> None:
        self._plan, self._gather, self._lane, self.peers = plan, gather, lane, peers
        self.fillers: list[Filler] = []
        self.device, self.home = lane.device, home
        self.address_checks = DeviceChecks(lane)
        self.units = plan.make_units()
        self._used: set[int] = set()  # units that were whole since the last step
        self._annexes: dict[int, DeviceSlot] = {}  # by number of the unit: slots made by add()
        self.rows: DeviceRows = DeviceRows(plan.row_weights(self.units), plan.dtype, gather, lane)
        self._make_slots()

    # --- slots -----------------------------------------------------------------------------------------------

    def _make_slots(self) -> None:
        blocks = [unit for unit in self.units if unit.in_ring]
        count, largest = _ring(blocks, self._plan.prefetch, self._plan.prefetch_nbytes)
        slots = [self._new_slot(largest, self.peers) for _ in range(count)]
        self._slots = {unit.index: slots[number % count] for number, unit in enumerate(blocks)}
        self._slots |= {unit.index: self._new_slot(unit.nbytes, self.peers) for unit in self.units if unit.keep}
        self._all_slots = list({id(slot): slot for slot in self._slots.values()}.values())
        for number, slot in self._slots.items():
            self._plan.make_views(self.units[number], slot.flat)

    def _new_slot(self, nbytes: int, peers: Peers = NO_PEERS) -> DeviceSlot:
        """Allocate a slot. Collective if ranks can read each other's slots."""
        count = nbytes // self._plan.dtype.itemsize
        return DeviceSlot(self._lane.buffer(peers, count, self._plan.dtype, "a unit's parameters"), self._lane)

    def _put(self, unit: Unit, slot: DeviceSlot) -> None:
        self._slots[unit.index] = slot
        self._plan.make_views(unit, slot.flat)

    def slot_of(self, unit: Unit) -> object:
        return self._slots.get(unit.index)  # a unit by rows has none

    def return_to(self, unit: Unit, slot: object) -> None:
        assert isinstance(slot, DeviceSlot)
        if slot is self._slots[unit.index]:
            return
        if unit.state is UnitState.GATHERING:
            self.wait(unit)
        if unit.state is not UnitState.SHARDED:
            self.owner.drop(unit)
        self._put(unit, slot)

    def add(self, unit: Unit) -> None:
        """Assign the unit a slot of its own, because another unit uses its slot."""
        slot = self._slots[unit.index]
        if unit.index in self._used and _in_backward():  # backward needs views of this slot
            raise RuntimeError(
                f"units {unit.name} and {slot.holder.name if slot.holder is not None else ''} are needed at the same "
                "time in backward, in the same slot on the device; another prefetch keeps them apart"
            )
        if unit.index not in self._annexes:
            self._annexes[unit.index] = self._new_slot(unit.nbytes)
            self._all_slots.append(self._annexes[unit.index])
        self._put(unit, self._annexes[unit.index])

    # --- gathering --------------------------------------------------------------------------------------------

    def take(self, unit: Unit, must: bool) -> bool:
        slot = self._slots[unit.index]
        if not self._vacate(slot, unit, must):
            return False
        slot.holder = unit
        return True

    def _vacate(self, slot: DeviceSlot, unit: Unit, must: bool) -> bool:
        """Drop another unit from the slot; return False if that unit is in use."""
        other = slot.holder
        if other is None or other is unit:
            return True
        if other is self.owner.in_use or (not other.idle and not (must and self._passed(other))):
            return False
        if other.state is UnitState.GATHERING:
            if not must:
                return False
            self.wait(other)
        other.in_backward = False  # its hook gathers it again if backward returns to it
        self.owner.drop(other)
        return True

    @staticmethod
    def _passed(unit: Unit) -> bool:
        """Return True if backward has left the unit for another one. Some of its gradients are missing, but its own
        backward is complete, because no other unit ran inside its forward (see hooks.py)."""
        return not unit.in_forward and not unit.surrounds and _in_backward()

    def fill(self, unit: Unit) -> None:
        for filler in self.fillers:
            filler.start(unit, self._slots[unit.index])

    def wait(self, unit: Unit) -> None:
        """Wait on the host for other ranks and the drive only; torch's stream waits for the copies."""
        if not unit.asked:  # an interrupt ended the submission
            self._abandon(unit)
            raise RuntimeError(f"gathering unit {unit.name} was interrupted; run the pass again")
        if unit.gathering is not None:
            self.owner.join(unit)
        self._lane.current().wait(self._slots[unit.index].ready)
        try:
            for filler in self.fillers:
                filler.wait(unit)
        except Exception:  # after an interrupt the gather continues, and a later call waits for it
            self.give_back(unit)
            raise

    def _abandon(self, unit: Unit) -> None:
        """Discard an interrupted gather: wait for its copies, then free the slot."""
        self._gather.synchronize()
        unit.gathering = None
        self._lane.current().wait(self._slots[unit.index].ready)
        self.give_back(unit)

    def is_waiting(self) -> bool:
        return self.rows.is_waiting() or any(filler.is_waiting() for filler in self.fillers)

    def give_up(self) -> None:
        for filler in self.fillers:
            filler.give_up()

    def map(self, unit: Unit) -> None:
        self._used.add(unit.index)

    def give_back(self, unit: Unit) -> None:
        """Free its slot for other units as soon as torch's stream reaches this point."""
        unit.asked = False  # so that after an interrupt here the unit does not pass for whole
        for filler in self.fillers:
            filler.cancel(unit)
        slot = self._slots[unit.index]
        self._lane.recorded(slot.freed)
        slot.holder = None
        unit.state, unit.stale = UnitState.SHARDED, False

    def reset(self, unit: Unit) -> None:
        slot = self._slots[unit.index]
        unit.gathering = None
        self._lane.current().wait(slot.ready)
        if slot.holder is unit or slot.holder is None:
            self.give_back(unit)
        unit.state, unit.stale = UnitState.SHARDED, False

    def count_free(self) -> None:
        for slot in self._all_slots:
            holder = slot.holder
            if holder is not None and holder.state is UnitState.SHARDED:
                slot.holder = None

    @property
    def gives_way(self) -> bool:
        return len(self._all_slots) < sum(not unit.by_rows for unit in self.units)

    @property
    def slot_nbytes(self) -> int:
        return self.rows.device_nbytes + sum(slot.flat.nbytes for slot in self._all_slots)

    @property
    def window_nbytes(self) -> int:
        sharers = int(self._plan.comm.local_world_size) if self._gather.shared else 1
        return self.rows.host_nbytes // sharers + sum(filler.window_nbytes for filler in self.fillers)

    @property
    def waited_s(self) -> float:
        return sum(filler.waited_s for filler in self.fillers)

    @property
    def allocation_count(self) -> int:
        return sum(filler.allocation_count for filler in self.fillers)

    # --- changes of weights: other ranks may still read the old ones ------------------------------------------

    def synchronize(self) -> None:
        self._lane.wait_for(self._lane.h2d)

    @property
    def copies_whole(self) -> bool:  # type: ignore[override]
        return all(filler.shared_whole for filler in self.fillers)

    def wait_copied(self, unit: Unit) -> None:
        for filler in self.fillers:
            filler.wait_copied(unit)

    def begin_edit(self) -> None:
        self.synchronize()
        if not self.editing:
            self.editing = True
            if self._plan.comm.world_size > 1:
                self._plan.comm.barrier(name="old weights are unused")

    def end_edits(self) -> None:
        if self.editing:
            self.editing = False
            self._show_to_ranks("parameters after changes by the program")

    def publish(self) -> None:
        self._show_to_ranks("parameters")

    def _show_to_ranks(self, name: str) -> None:
        if self._plan.comm.world_size > 1 and any(filler.shared_whole for filler in self.fillers):
            self._plan.comm.barrier(name=name)

    def end_step(self) -> None:
        self.rows.settle()
        self._used.clear()
        for index, slot in self._annexes.items():
            self._put(self.units[index], slot)

    def close(self) -> None:
        for filler in self.fillers:
            filler.close()
        self.rows.close()
        self._slots.clear()
        self._all_slots.clear()
        self._annexes.clear()
        for unit in self.units:
            unit.views, unit.span = [], (0, 0)  # views of the slots' memory
