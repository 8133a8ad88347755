"""RowReader: rows of large weights in host memory, gathered range by range into two slots.

While a range is used the next one is on its way. Ranks must ask for the same ranges in the same order, as for units.
Thread rule: as UnitLife; ``_fill`` on the gathering thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.layout.row_blocks import SLOTS, block_slots, largest_block
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.memory import UnitPlan
from zcomm.zero.units.unit import Unit
from zcomm.zero.worker import Call

_Piece = tuple[int, int]  # rows


class RowReader:
    """Memory: SLOTS slots of the largest block of ``units``. ``memories`` has it."""

    def __init__(self, plan: UnitPlan, gather: ShardGather, units: Sequence[Unit]) -> None:
        self._plan, self._gather = plan, gather
        page = _core.page_nbytes()
        self._params = {unit.index: unit.buckets[0].params[0] for unit in units}
        self._shapes = {number: plan.geometry.places[param].shape for number, param in self._params.items()}
        count = block_slots(self._shapes.values())
        nbytes = -(-count * plan.dtype.itemsize // page) * page
        self.memories: list[Any] = [gather.allocate(SLOTS * nbytes)] if units else []
        self._slots = list(tensor_of(self.memories[0], plan.dtype).view(SLOTS, -1)) if units else []
        self._call: Call[None] | None = None  # the last one

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

    def _pieces(self, unit: Unit, pieces: Sequence[_Piece]) -> Iterator[torch.Tensor]:
        coming = self._start(unit, pieces[0], 0)
        for number in range(len(pieces)):
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
        call = self._call = self._gather.submit(self._fill, name, unit, begin * width, out)
        return call, out.view(end - begin, width)

    def _fill(self, name: str, unit: Unit, begin: int, out: torch.Tensor) -> None:
        """Bring elements of the weight, from ``begin`` on, out of each of its buckets. On the gathering thread."""
        for span in self._plan.geometry.spans(self._params[unit.index]):
            low, high = max(begin, span.begin), min(begin + out.numel(), span.begin + span.count)
            if low < high:
                at = span.offset - span.begin
                part, into = slice(at + low, at + high), out[low - begin : high - begin]
                self._gather.fill_part(name, self._plan.geometry.every[span.bucket], part, into)

    def is_waiting(self) -> bool:
        """Return True if rows are on their way, for which other ranks are needed."""
        return self._call is not None and not self._call.done()

    def settle(self) -> None:
        """Wait for what was left on its way by a use that an error has ended."""
        call, self._call = self._call, None
        if call is not None:
            with suppress(Exception):  # its user, if there was one, has had the error
                call.result()

    def close(self) -> None:
        self._slots.clear()
        self.memories.clear()
