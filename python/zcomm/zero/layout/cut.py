"""Cut: the elements of a whole tensor that this rank's part has.

[Note: cuts] Ranks along "tensor" have equal parts of a tensor, along one dimension. In the order of the whole tensor's
elements the parts alternate. A row of ``count * run`` elements has ``run`` elements of each part. A division along the
first dimension has one row. A fused tensor is divided in each of its ``blocks`` along the dimension, which are rows,
too. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cut:
    """Part ``index`` of ``count`` equal parts of a tensor of ``shape``, along dimension ``dim``. count 1: all of it.
    blocks: blocks of the dimension, of each of which the part has its elements."""

    shape: torch.Size
    dim: int = 0
    index: int = 0
    count: int = 1
    blocks: int = 1

    @property
    def run(self) -> int:
        """Consecutive elements of a part."""
        return math.prod(self.shape[self.dim :]) // self.count // self.blocks if self.count > 1 else self.shape.numel()

    def spans(self, most: int) -> Iterator[tuple[int, slice | None, bool]]:
        """Cut the whole tensor into consecutive spans of ``most`` elements or less, in order.

        Yields the number of elements, this part's flat elements in the span (None: none), and whether parts alternate
        in it. If they do not, all of its elements are of one part. The spans are the same for each part.
        """
        run, row = self.run, self.run * self.count
        if self.count == 1 or row > most:
            for first in range(0, max(math.prod(self.shape), 1), max(run, 1)):
                mine = self.count == 1 or first // run % self.count == self.index
                begin = first // row * run if self.count > 1 else 0
                for low in range(0, max(run, 1), most):
                    high = min(low + most, run)
                    yield high - low, slice(begin + low, begin + high) if mine else None, False
            return
        rows, at_once = math.prod(self.shape) // row if row else 0, max(most // max(row, 1), 1)
        for low in range(0, max(rows, 1), at_once):
            high = min(low + at_once, rows)
            yield (high - low) * row, slice(low * run, high * run), True

    def place(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Copy consecutive whole runs of the part to their places in ``whole``, a flat span of whole rows."""
        if part.numel():
            whole.view(-1, self.count, self.run)[:, self.index] = part.view(-1, self.run)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a whole tensor, to read: a view, but a copy if there are several blocks."""
        if self.count == 1:
            return whole
        size = self.shape[self.dim] // self.count // self.blocks
        if self.blocks == 1:
            return whole.narrow(self.dim, self.index * size, size)
        rows: torch.Tensor = whole.unflatten(self.dim, (self.blocks, self.shape[self.dim] // self.blocks))
        return rows.narrow(self.dim + 1, self.index * size, size).flatten(self.dim, self.dim + 1)

    def read(self, elements: slice, read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """Return flat elements of the part. read: of the whole tensor, flat elements [begin, end)."""
        if self.count == 1:
            return read(elements.start, elements.stop)
        run, row = self.run, self.run * self.count
        found, at = [], elements.start
        while at < elements.stop:
            line, inside = divmod(at, run)
            if inside == 0 and row <= _MOST and elements.stop - at >= run:  # whole rows at once
                lines = min((elements.stop - at) // run, max(_MOST // row, 1))
                rows = read(line * row, (line + lines) * row)
                found.append(rows.view(-1, self.count, run)[:, self.index].reshape(-1))
                at += lines * run
                continue
            end = min(elements.stop, (line + 1) * run)
            begin = line * row + self.index * run + inside
            found.append(read(begin, begin + end - at))
            at = end
        return torch.cat(found) if len(found) != 1 else found[0]


_MOST = 1 << 20  # elements that are read at once
