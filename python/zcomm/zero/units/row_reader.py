"""RowReader: rows of large weights in host memory, gathered range by range into two slots.

While a range is used the next one is on its way. Ranks must ask for the same ranges in the same order, as for units.
Thread rule: as UnitLife; ``_fill`` on the gathering thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.row_blocks import SLOTS, block_slots, largest_block
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan
from zcomm.zero.units.unit import Unit
from zcomm.zero.worker import Call

_Piece = tuple[int, int]  # rows
_Part = tuple[FlatBucket, slice, slice]  # elements of a bucket, and where they go in the memory that they are read into
Asks = Callable[[Unit, Collection[int]], None]


class RowReader:
    """Memory: SLOTS slots of the largest block of ``units``. ``memories`` has it.

    asks: called before rows of a unit are asked for, with the numbers of the buckets that they lie in.
    """

    def __init__(
        self, plan: UnitPlan, gather: ShardGather, units: Sequence[Unit], asks: Asks = lambda unit, buckets: None
    ) -> None:
        self._plan, self._gather, self._asks = plan, gather, asks
        page = _core.page_nbytes()
        self._params = {unit.index: unit.buckets[0].params[0] for unit in units}
        self._shapes = {number: plan.geometry.places[param].shape for number, param in self._params.items()}
        count = block_slots(self._shapes.values())
        nbytes = -(-count * plan.dtype.itemsize // page) * page
        self.memories: list[Any] = [gather.allocate(SLOTS * nbytes)] if units else []
        self._slots = list(tensor_of(self.memories[0], plan.dtype).view(SLOTS, -1)) if units else []
        self._call: Call[Any] | None = None  # the last one
        self._reads: frozenset[int] = frozenset()  # the buckets that it reads

    def read(self, unit: Unit, ranges: Sequence[tuple[int, int]]) -> Iterator[torch.Tensor]:
        """Yield rows [begin, end). A range larger than a slot is put together in memory of its own."""
        self.settle()
        step = largest_block(self._shapes[unit.index])
        cut = [[(at, min(at + step, end)) for at in range(begin, end, step)] for begin, end in ranges]
        pieces = self._pieces(unit, [piece for of_range in cut for piece in of_range])
        for of_range, (begin, end) in zip(cut, ranges, strict=True):
            if len(of_range) == 1:
                yield next(pieces)
                continue
            whole = torch.empty(end - begin, self._shapes[unit.index][1], dtype=self._plan.dtype)
            for low, high in of_range:
                whole[low - begin : high - begin] = next(pieces)
            yield whole

    def maximum(self, unit: Unit, used: torch.Tensor) -> torch.Tensor:
        """Return the maximum over ranks of ``used``, which tells of rows of the unit. Collective."""
        self.settle()
        name = f"the rows of {unit.name} that ranks use"
        self._reads = frozenset()
        call: Call[torch.Tensor] = self._gather.submit(self._gather.maximum, name, used)
        self._call = call
        return call.result()

    def _pieces(self, unit: Unit, pieces: Sequence[_Piece]) -> Iterator[torch.Tensor]:
        coming = self._start(unit, pieces[0], 0) if pieces else None
        for number in range(len(pieces)):
            assert coming is not None
            call, out = coming
            call.result()
            if number + 1 < len(pieces):  # after this one has come: the caller has done with the one before
                coming = self._start(unit, pieces[number + 1], (number + 1) % SLOTS)
            yield out

    def _start(self, unit: Unit, piece: _Piece, slot: int) -> tuple[Call[None], torch.Tensor]:
        begin, end = piece
        width = self._shapes[unit.index][1]
        out = self._slots[slot][: (end - begin) * width]
        name = f"rows {begin} to {end} of {unit.name}"
        if unit.edits:
            name += f" after {unit.edits} changes of weights by the program"
        parts = self._parts(unit, begin * width, out.numel())
        self._reads = frozenset(bucket.index for bucket, _, _ in parts)
        self._asks(unit, self._reads)
        call = self._call = self._gather.submit(self._fill, name, parts, out)
        return call, out.view(end - begin, width)

    def _parts(self, unit: Unit, begin: int, count: int) -> list[_Part]:
        """Return the parts of buckets that have ``count`` elements of the weight, from ``begin`` on."""
        found: list[_Part] = []
        for span in self._plan.geometry.spans(self._params[unit.index]):
            low, high = max(begin, span.begin), min(begin + count, span.begin + span.count)
            if low < high:
                at = span.offset - span.begin
                bucket = self._plan.geometry.every[span.bucket]
                found.append((bucket, slice(at + low, at + high), slice(low - begin, high - begin)))
        return found

    def _fill(self, name: str, parts: Sequence[_Part], out: torch.Tensor) -> None:
        """Bring ``parts`` into ``out``. On the gathering thread."""
        for bucket, part, into in parts:
            self._gather.fill_part(name, bucket, part, out[into])

    def is_waiting(self) -> bool:
        """Return True if rows are on their way, for which other ranks are needed."""
        return self._call is not None and not self._call.done()

    def is_reading(self, bucket: int) -> bool:
        """Return True if rows of a bucket are on their way."""
        return bucket in self._reads and self.is_waiting()

    def settle(self) -> None:
        """Wait for what was left on its way by a use that an error has ended."""
        call, self._call = self._call, None
        if call is not None:
            with suppress(Exception):  # its user, if there was one, has had the error
                call.result()

    def close(self) -> None:
        self._slots.clear()
        self.memories.clear()
