"""DeviceRows: rows of large weights on a device, range by range through host memory (reader.py).

A range is copied to one of two slots on the device, on the lane's ``h2d`` stream. Torch's stream waits for the copy.
The next copy into the slot waits for the kernels that use it. The host waits for a copy before the reader fills its
host slot again; the kernels that use the rows have been issued by then.
Thread rule: as RowReader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zcomm.comm.tensors import tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.rows.blocks import SLOTS, block_slots
from zcomm.zero.rows.reader import Asks, Gather, RowReader, RowWeight


class _Slot:
    """Memory on the device. ready: its copy has ended. freed: torch's stream has used it."""

    def __init__(self, flat: torch.Tensor, lane: DeviceLane) -> None:
        self.flat, self.ready = flat, lane.event()
        self.freed = lane.recorded(lane.event())  # by the memory's last owner, in the order of torch's stream


class DeviceRows(RowReader):
    """Memory: of RowReader, page-locked, and as many slots of the largest block of ``weights`` on the device."""

    def __init__(self, weights: Sequence[RowWeight], dtype: torch.dtype, gather: Gather, lane: DeviceLane) -> None:
        super().__init__(weights, dtype, gather)
        self._lane = lane
        self.host_nbytes = self.nbytes
        for memory in self.memories:
            lane.lock(tensor_of(memory, dtype))
        count = block_slots(weight.shape for weight in weights)
        self._device_slots = [self._slot(count) for _ in range(SLOTS)] if weights else []

    def _slot(self, count: int) -> _Slot:
        return _Slot(self._lane.empty(count, self._dtype, "rows of weights"), self._lane)

    @property
    def device_nbytes(self) -> int:
        return sum(slot.flat.nbytes for slot in self._device_slots)

    def read(
        self, weight: RowWeight, ranges: Sequence[tuple[int, int]], edits: int, asks: Asks
    ) -> Iterator[torch.Tensor]:
        """Yield rows [begin, end), on the device."""
        for number, rows in enumerate(super().read(weight, ranges, edits, asks)):
            slot = self._device_slots[number % SLOTS]
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
        self._device_slots.clear()
