"""Units in host memory: a ring of slots, mapped behind the addresses of the units that are whole.

[Note: unit addresses] Every unit has fixed addresses in a reserved range and no memory behind them. It is gathered into
a slot of a small ring, which is then mapped behind the unit's addresses. Views that autograd saved in forward point to
the unit's own addresses. So they are valid again in backward, after the unit has been gathered again. Between forward
and backward they read NaN, so that no number from a view that the program kept can pass for a weight.
The slots have the sizes of the largest units, so that any units in use at once fit. A unit uses the smallest slot that
it fits into: a ring for an embedding and many Linears has one slot of the embedding's size.
Thread rule: as UnitManager; ``_fill`` on the gathering thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.span_cache import whole_pages
from zcomm.zero.rows.reader import RowReader
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan, UnitPool, add_remedy
from zcomm.zero.units.slot import Slot
from zcomm.zero.units.slot_ring import SlotRing, ring_sizes
from zcomm.zero.units.unit import Unit, UnitState


def plan_nbytes(units: Sequence[Unit], prefetch: int, prefetch_nbytes: int | None) -> int:
    """Return the bytes of the slots for ``units`` (sizes in whole pages), without units by rows."""
    return sum(ring_sizes(units, prefetch, prefetch_nbytes)) + sum(unit.nbytes for unit in units if unit.keep)


def round_up(units: Sequence[Unit]) -> None:
    """Round the units' sizes up to whole pages."""
    for unit in units:
        unit.nbytes = whole_pages(unit.nbytes)


class HostMemory(UnitPool):
    """See [Note: unit addresses].

    Memory: slots for the prefetch + 2 largest units, and one for each resident unit. Another slot is allocated whenever
    all slots that a unit fits into are in use. Pages that read NaN: 1 MiB; for more than 4 GiB of units, 1/4096 of
    their bytes.
    """

    device = torch.device("cpu")

    def __init__(self, plan: UnitPlan, gather: ShardGather) -> None:
        self._plan, self._gather = plan, gather
        self.units = plan.make_units()
        round_up(self.units)
        self._reserve()
        self._allocate()
        gather.bases.reserve(self.units)
        for unit in self.units:
            plan.make_views(unit, tensor_of(self._range.memory(unit.offset, unit.nbytes), plan.dtype))

    def _reserve(self) -> None:
        largest = max((unit.nbytes for unit in self.units if unit.in_ring), default=0)
        table = _core.table_nbytes()  # at multiples of it slots are mapped fastest; addresses cost nothing
        rooms = [-(-(largest if unit.in_ring else unit.nbytes) // table) * table for unit in self.units]
        *offsets, end = accumulate(rooms, initial=0)
        for unit, offset in zip(self.units, offsets, strict=True):
            unit.offset = offset
        self._range = _core.AddressRange(max(end, table), reads_nan=True)

    def _allocate(self) -> None:
        ahead, kept = (self._plan.prefetch, self._plan.prefetch_nbytes), [unit for unit in self.units if unit.keep]
        sizes = ring_sizes(self.units, *ahead)
        begins = list(accumulate((*sizes, *(unit.nbytes for unit in kept)), initial=0))
        memory = self._gather.allocate(plan_nbytes(self.units, *ahead))
        self._memories = [memory]
        self.slots = [Slot(memory, begin, size) for begin, size in zip(begins, sizes, strict=False)]
        for unit, begin in zip(kept, begins[len(self.slots) : -1], strict=True):
            unit.own = Slot(memory, begin, unit.nbytes)
        self.ring = SlotRing(sizes)
        self.rows = RowReader(self._plan.row_weights(self.units), self._plan.dtype, self._gather)

    def _slot(self, unit: Unit) -> Slot:
        return unit.own or self.slots[unit.slot]

    def take(self, unit: Unit, must: bool) -> bool:
        return unit.keep or self.ring.take(unit, self.units, self.owner)

    def add(self, unit: Unit) -> None:
        """Allocate another slot. Collective: all ranks do so in the order of the gathers."""
        memory = self._gather.submit(self._gather.allocate, unit.nbytes).result()
        self._memories.append(memory)
        self.slots.append(Slot(memory, 0, unit.nbytes))
        self.ring.add(unit.nbytes)

    def fill(self, unit: Unit) -> None:
        unit.stamp = self._gather.bases.stamp(unit)
        unit.gathering = self._gather.submit(self._fill, unit)

    def _fill(self, unit: Unit) -> None:
        """Fill the unit's slot. Runs on the gathering thread."""
        if not unit.buckets:
            return
        slot = self._slot(unit)
        flat = slot.flat(unit.nbytes, self._plan.dtype)
        wholes = [flat[begin : begin + bucket.count] for bucket, begin in unit.bucket_begins()]
        self._gather.fill(unit, unit.buckets, wholes)

    def wait(self, unit: Unit) -> None:
        try:
            self.owner.join(unit)
        except (_core.CollectiveMismatch, _core.PeerLost, TimeoutError) as error:
            add_remedy(error)
            raise

    def map(self, unit: Unit) -> None:
        self._slot(unit).map(self._range, unit.offset)

    def give_back(self, unit: Unit) -> None:
        self._slot(unit).unmap(self._range, unit.offset)
        unit.state, unit.stale = UnitState.SHARDED, False
        if not unit.keep:
            self.ring.give_back(unit)

    def reset(self, unit: Unit) -> None:
        if unit.keep or unit.slot >= 0:
            self._slot(unit).forget(self._range, unit.offset)
        unit.gathering, unit.state, unit.stale, unit.slot = None, UnitState.SHARDED, False, -1

    def count_free(self) -> None:
        self.ring.count_free(self.units)

    def end_step(self) -> None:
        self.rows.settle()

    def is_waiting(self) -> bool:
        return self.rows.is_waiting()

    @property
    def gives_way(self) -> bool:
        return self.ring.gives_way(self.units)

    @property
    def slot_nbytes(self) -> int:
        ring: int = self.rows.nbytes + sum(memory.nbytes for memory in self._memories)
        return ring // self._plan.comm.local_world_size if self._gather.shared else ring

    def close(self) -> None:
        for unit in self.units:
            unit.own = None
        self.rows.close()
        self._memories.clear()  # nothing gathers after close()
        self.slots.clear()
