"""Cut: the elements of a whole tensor that this rank's part has.

[Note: cuts] Ranks along "tensor" have equal parts of a tensor, along one dimension. Ranks along "expert" have equal
parts of experts in one tensor, along the first dimension. In the order of the whole tensor's elements the parts
alternate. A row of ``count * run`` elements has ``run`` elements of each part. A division along the first dimension has
one row. A fused tensor is divided in each of its ``blocks`` along the dimension, which are rows, too. Pure arithmetic,
but for ``ExpertPart.joined``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator


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


@dataclass(frozen=True)
class ExpertPart:
    """Mark of a parameter (its attribute ``zcomm_part``) that is part ``index`` of ``count`` equal parts, along
    dimension 0, on the ranks of ``comm``. count 1: it is whole, under a name that other ranks do not have."""

    index: int = 0
    count: int = 1
    comm: Communicator | None = None

    def cut(self, shape: torch.Size) -> Cut:
        """Return the place of the part of ``shape`` in the whole tensor."""
        return Cut(
            torch.Size((shape[0] * self.count, *shape[1:])) if self.count > 1 else shape, 0, self.index, self.count
        )

    def joined(self, part: torch.Tensor, name: str = "experts") -> torch.Tensor:
        """Return a whole tensor of the ranks' parts, on the device of ``part``. Collective over ``comm``."""
        if self.comm is None:
            return part
        octets = part.detach().to(self.comm.device).contiguous().view(-1).view(torch.uint8)
        every = self.comm.all_gather(octets, name=name)
        assert isinstance(every, torch.Tensor)
        return every.view(part.dtype).view(-1, *part.shape[1:]).to(part.device)


def expert_part(param: object) -> ExpertPart | None:
    """Return the mark of an expert's parameter, if it has one."""
    return getattr(param, "zcomm_part", None)


_MOST = 1 << 20  # elements that are read at once
