"""RowWeight: a weight that is gathered by rows, and its place in buckets; and Gather, which reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from zcomm.zero.worker import Call

T = TypeVar("T")
Part = tuple[Any, slice, slice]  # elements of a bucket, and their place in the memory that they are read into


@dataclass(frozen=True)
class Stretch:
    """Elements [begin, end) of a weight, stored in ``bucket`` (FlatBucket) from ``begin + shift`` on."""

    bucket: Any
    begin: int
    end: int
    shift: int


@dataclass(frozen=True, eq=False)
class RowWeight:
    """A weight that is gathered by rows, [rows, ...], and its stretches in buckets.

    index: number of the parameter. unit, name: of its unit.
    """

    param: nn.Parameter
    index: int
    unit: int
    name: str
    shape: torch.Size
    stretches: Sequence[Stretch]

    def parts(self, begin: int, end: int) -> list[Part]:
        """Return the parts of buckets that have elements [begin, end) of the weight."""
        found: list[Part] = []
        for each in self.stretches:
            low, high = max(begin, each.begin), min(end, each.end)
            if low < high:
                into = slice(low - begin, high - begin)
                found.append((each.bucket, slice(each.shift + low, each.shift + high), into))
        return found


class Gather(Protocol):
    """The methods of ShardGather that rows need."""

    def allocate(self, nbytes: int) -> Any: ...
    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]: ...
    def fill_part(self, name: str, bucket: Any, part: slice, out: torch.Tensor) -> None: ...
    def maximum(self, name: str, values: torch.Tensor) -> torch.Tensor: ...
