"""Spans of shards: which elements each has, and which of them are on a drive. A few bytes for each, whatever its key.

A model of billions of parameters has thousands of spans. As tuples, strings and a dict they would be a part of the
optimizer that is in memory, and grows with the model.
Thread rule: nothing changes after construction.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import overload

Span = tuple[int, int, int]  # bucket, first element of its shard, count


class Spans(Sequence[Span]):
    """The spans of shards of ``counts`` elements, ``step`` elements each but the last one of a shard."""

    def __init__(self, counts: Sequence[int], step: int) -> None:
        self._counts, self.step = counts, step
        self._first = array("q", accumulate((-(-count // step) for count in counts), initial=0))  # by bucket

    def __len__(self) -> int:
        return self._first[-1]

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        return self._span(bisect_right(self._first, number) - 1, number)

    def __iter__(self) -> Iterator[Span]:
        for bucket in range(len(self._counts)):
            yield from self.of(bucket)

    def of(self, bucket: int) -> Iterator[Span]:
        """Yield the spans of one shard; none if the bucket does not exist."""
        if 0 <= bucket < len(self._counts):
            for number in range(self._first[bucket], self._first[bucket + 1]):
                yield self._span(bucket, number)

    def _span(self, bucket: int, number: int) -> Span:
        begin = (number - self._first[bucket]) * self.step
        return bucket, begin, min(self.step, self._counts[bucket] - begin)

    def at(self, bucket: int, element: int) -> int:
        """Return the place in this sequence of the span that has ``element`` of the bucket's shard."""
        return self._first[bucket] + element // self.step


class SpanSubset(Sequence[Span]):
    """The ``spans`` that ``chosen`` has a true value for, numbered in their order."""

    def __init__(self, spans: Spans, chosen: Iterable[bool]) -> None:
        self._spans = spans
        self._places = array("i", (place for place, is_in in enumerate(chosen) if is_in))
        self._numbers = array("i", [-1]) * len(spans)
        for number, place in enumerate(self._places):
            self._numbers[place] = number

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> list[Span]: ...
    def __getitem__(self, index: int | slice) -> Span | list[Span]:
        if isinstance(index, slice):
            return [self._spans[place] for place in self._places[index]]
        return self._spans[self._places[index]]

    def number(self, span: Span) -> int:
        """Return the number of a span, or -1 if it is not one of these."""
        return self._numbers[self._spans.at(span[0], span[1])]
