"""SlotRing: assigns the slots of a ring to units, and chooses the unit to evict.

It knows only sizes: HostMemory has memory behind the slots, planning none.
Thread rule: as UnitManager.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zcomm.zero.options import slot_sizes
from zcomm.zero.units.memory import UnitOwner
from zcomm.zero.units.unit import Unit, UnitState


def ring_sizes(units: Iterable[Unit], prefetch: int, prefetch_nbytes: int | None) -> list[int]:
    """Return the bytes of the slots in host memory that ``units`` share."""
    return slot_sizes([unit.nbytes for unit in units if unit.in_ring], prefetch, prefetch_nbytes)


class SlotRing:
    """Slots of ``sizes``, bytes, by number. free: numbers of unused slots."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self.sizes = list(sizes)
        self.free = list(range(len(self.sizes)))

    def take(self, unit: Unit, units: Sequence[Unit], owner: UnitOwner) -> bool:
        """Assign the smallest free slot that the unit fits into; return False if all such slots are in use.

        If none is free, an idle unit of ``units`` is dropped.
        """
        fitting = [number for number in reversed(self.free) if self.sizes[number] >= unit.nbytes]
        if fitting:
            slot = min(fitting, key=lambda number: self.sizes[number])
        else:
            gone = self._idle(unit, units, owner)
            if gone is None:
                return False
            slot = gone.slot
            owner.drop(gone)
        self.free.remove(slot)
        unit.slot = slot
        return True

    def _idle(self, unit: Unit, units: Sequence[Unit], owner: UnitOwner) -> Unit | None:
        idle = [u for u in units if u.state is UnitState.GATHERED and u.idle and u.in_ring]
        idle = [u for u in idle if u is not owner.in_use and self.sizes[u.slot] >= unit.nbytes]
        if not idle:
            return None
        until = {index: -place for place, index in reversed(list(enumerate(owner.coming)))}
        # Among the smallest slots: the unit that is needed last, if known, otherwise the least recently used one.
        return min(idle, key=lambda u: (self.sizes[u.slot], until.get(u.index, -math.inf), u.last_use))

    def add(self, nbytes: int) -> None:
        """Add a free slot."""
        self.sizes.append(nbytes)
        self.free.append(len(self.sizes) - 1)

    def give_back(self, unit: Unit) -> None:
        """Free the unit's slot."""
        self.free.append(unit.slot)
        unit.slot = -1

    def count_free(self, units: Iterable[Unit]) -> None:
        """Find the slots that none of ``units`` holds."""
        used = {unit.slot for unit in units}
        self.free = [number for number in range(len(self.sizes)) if number not in used]

    def gives_way(self, units: Iterable[Unit]) -> bool:
        """Return True if one of ``units`` may lose its slot to another."""
        return len(self.sizes) < sum(unit.in_ring for unit in units)
