"""DeviceRows: rows of large weights on a device, range by range through host memory (row_reader.py).

A range is copied to one of two slots on the device, on the lane's ``h2d`` stream. Torch's stream waits for the copy.
The next copy into the slot waits for what used it. The host waits for a copy before the reader fills its slot anew;
what uses the rows is on its way by then.
Thread rule: as RowReader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zcomm.comm.tensors import tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.row_blocks import SLOTS, block_slots
from zcomm.zero.units.device_slot import DeviceSlot
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan
from zcomm.zero.units.row_reader import Asks, RowReader
from zcomm.zero.units.unit import Unit


class DeviceRows(RowReader):
    """Memory: that of RowReader, page-locked, and as many slots of the largest block of ``units`` on the device."""

    def __init__(
        self, plan: UnitPlan, gather: ShardGather, units: Sequence[Unit], asks: Asks, lane: DeviceLane
    ) -> None:
        super().__init__(plan, gather, units, asks)
        self._lane = lane
        self.host_nbytes: int = sum(memory.nbytes for memory in self.memories)
        for memory in self.memories:
            lane.lock(tensor_of(memory, plan.dtype))
        count = block_slots(self._shapes.values())
        self.device_slots = [self._slot(count) for _ in range(SLOTS)] if units else []

    def _slot(self, count: int) -> DeviceSlot:
        return DeviceSlot(self._lane.empty(count, self._plan.dtype, "rows of weights"), self._lane)

    def read(self, unit: Unit, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Yield rows [begin, end), on the device."""
        for number, rows in enumerate(super().read(unit, ranges)):
            slot = self.device_slots[number % SLOTS]
            if rows.numel() > slot.flat.numel():
                slot = self._slot(rows.numel())
            there = slot.flat[: rows.numel()]
            self._lane.h2d.copy([(there, rows)], [slot.freed], slot.ready)
            try:
                self._lane.current().wait(slot.ready)
                yield there.view(rows.shape)
            finally:
                self._lane.recorded(slot.freed)
                self._lane.wait(slot.ready)

    def close(self) -> None:
        super().close()
        self.device_slots.clear()
