"""RowReader: rows of large weights in host memory, gathered range by range into two slots.

While a range is used the next one is in flight. Ranks must ask for the same ranges in the same order, as for units.
Thread rule: as UnitManager; ``_fill`` on the gathering thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.rows.blocks import SLOTS, block_slots, largest_block, row_width, slots_nbytes
from zcomm.zero.rows.matrices import Matrices
from zcomm.zero.rows.weight import Gather, Part, RowWeight
from zcomm.zero.worker import Call

_Piece = tuple[int, int]  # rows
Asks = Callable[[Collection[int]], None]


class RowReader:
    """Memory: SLOTS slots of the largest block of ``weights``, of ``dtype``. ``memories`` has it."""

    def __init__(self, weights: Sequence[RowWeight], dtype: torch.dtype, gather: Gather) -> None:
        self.weights, self._dtype, self._gather = weights, dtype, gather
        nbytes = slots_nbytes([weight.shape for weight in weights], dtype.itemsize, _core.page_nbytes())
        self.memories: list[Any] = [gather.allocate(nbytes)] if weights else []
        self._slots = list(tensor_of(self.memories[0], dtype).view(SLOTS, -1)) if weights else []
        self._call: Call[Any] | None = None  # the last call
        self._reads: frozenset[int] = frozenset()  # the buckets that the last call reads
        self.matrices = Matrices(weights, dtype, gather)

    @property
    def nbytes(self) -> int:
        ours: int = sum(memory.nbytes for memory in self.memories)
        return ours + self.matrices.nbytes

    def read(
        self, weight: RowWeight, ranges: Sequence[tuple[int, int]], edits: int, asks: Asks
    ) -> Iterator[torch.Tensor]:
        """Yield rows [begin, end) of each range, in memory of the reader until the next range. A range larger than a
        slot is assembled in memory of its own. Collective.

        edits: changes of weights by the program so far, which ranks compare. asks: called before a gather is submitted,
        with the numbers of its buckets.
        """
        self.settle()
        step = largest_block(weight.shape)
        cut = [[(at, min(at + step, end)) for at in range(begin, end, step)] for begin, end in ranges]
        name = f"{weight.name} after {edits} changes of weights by the program" if edits else weight.name
        pieces = self._pieces(weight, [piece for of_range in cut for piece in of_range], name, asks)
        for of_range, (begin, end) in zip(cut, ranges, strict=True):
            if len(of_range) == 1:
                yield next(pieces)
                continue
            whole = torch.empty(end - begin, *weight.shape[1:], dtype=self._dtype)
            for low, high in of_range:
                whole[low - begin : high - begin] = next(pieces)
            yield whole

    def maximum(self, weight: RowWeight, used: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks of ``used`` (``used_rows``). Collective."""
        self.settle()
        name = f"the rows of {weight.name} that ranks use"
        self._reads = frozenset()
        call: Call[torch.Tensor] = self._gather.submit(self._gather.maximum, name, used)
        self._call = call
        return call.result()

    def _pieces(self, weight: RowWeight, pieces: Sequence[_Piece], name: str, asks: Asks) -> Iterator[torch.Tensor]:
        coming = self._start(weight, pieces[0], 0, name, asks) if pieces else None
        for number in range(len(pieces)):
            assert coming is not None
            call, out = coming
            call.result()
            if number + 1 < len(pieces):  # only now, because the caller has finished with the previous piece
                coming = self._start(weight, pieces[number + 1], (number + 1) % SLOTS, name, asks)
            yield out

    def _start(
        self, weight: RowWeight, piece: _Piece, slot: int, name: str, asks: Asks
    ) -> tuple[Call[None], torch.Tensor]:
        (begin, end), width = piece, row_width(weight.shape)
        out = self._slots[slot][: (end - begin) * width]
        parts = weight.parts(begin * width, end * width)
        self._reads = frozenset(bucket.index for bucket, _, _ in parts)
        asks(self._reads)
        call = self._call = self._gather.submit(self._fill, f"rows {begin} to {end} of {name}", parts, out)
        return call, out.view(end - begin, *weight.shape[1:])

    def _fill(self, name: str, parts: Sequence[Part], out: torch.Tensor) -> None:
        """Gather ``parts`` into ``out``. Runs on the gathering thread."""
        for bucket, part, into in parts:
            self._gather.fill_part(name, bucket, part, out[into])

    def is_waiting(self) -> bool:
        """Return True if a gather of rows, which needs other ranks, is in flight."""
        return self._call is not None and not self._call.done()

    def is_reading(self, bucket: int) -> bool:
        """Return True if a gather of rows of the bucket is in flight."""
        return bucket in self._reads and self.is_waiting()

    def settle(self) -> None:
        """Wait for a read that is still in flight, because an error has ended its use."""
        self.matrices.settle()
        call, self._call = self._call, None
        if call is not None:
            with suppress(Exception):  # a caller that waited for it has raised the error
                call.result()

    def close(self) -> None:
        self._slots.clear()
        self.memories.clear()
        self.matrices.close()


class _DeviceSlot:
    """Memory on the device. ready: its copy has ended. freed: torch's stream has used it."""

    def __init__(self, flat: torch.Tensor, lane: DeviceLane) -> None:
        self.flat, self.ready = flat, lane.event()
        self.freed = lane.recorded(lane.event())  # by the memory's last owner, in the order of torch's stream


class DeviceRows(RowReader):
    """RowReader of a device: a range is copied to one of two slots there, on the lane's ``h2d`` stream.

    Torch's stream waits for the copy. The next copy into the slot waits for the kernels that use it. The host waits for
    a copy before the reader fills its host slot again; the kernels that use the rows have been issued by then.
    Memory: of RowReader, page-locked, and as many slots of the largest block of ``weights`` on the device.
    """

    def __init__(self, weights: Sequence[RowWeight], dtype: torch.dtype, gather: Gather, lane: DeviceLane) -> None:
        super().__init__(weights, dtype, gather)
        self._lane = lane
        self.host_nbytes = self.nbytes
        for memory in self.memories:
            lane.lock(tensor_of(memory, dtype))
        count = block_slots(weight.shape for weight in weights)
        self._device_slots = [self._slot(count) for _ in range(SLOTS)] if weights else []

    def _slot(self, count: int) -> _DeviceSlot:
        return _DeviceSlot(self._lane.empty(count, self._dtype, "rows of weights"), self._lane)

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
