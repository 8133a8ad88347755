"""Trace: spans of one rank by lane, the seconds that they cover, and Chrome's JSON of them.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format): complete
events ("X") nest on a thread; asynchronous ones ("b", "e") may overlap. One process per rank, one thread per lane.
Perfetto takes thread 0 for the thread of the process's number, so lanes count from 1. It shows an "id" outside of all
processes, so ids are local to one ("id2").
Thread rule: any thread adds spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

LANES = ("compute", "waiting", "gathering", "communication", "swap")
_OVERLAPPING = ("communication", "swap")
Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Span:
    """Begin and end in nanoseconds of time.perf_counter_ns, and further facts."""

    lane: str
    name: str
    begin: int
    end: int
    args: dict[str, Any] = field(default_factory=dict)


class Trace:
    """Spans of one rank; grows while a profile is open. lanes: of the spans, in the order of the picture."""

    def __init__(self, lanes: Sequence[str] = LANES) -> None:
        self.spans: list[Span] = []
        self.origin = time.perf_counter_ns()
        self._lanes = lanes

    def add(self, lane: str, name: str, begin: int, end: int, **args: Any) -> None:
        self.spans.append(Span(lane, name, begin, end, args))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Add the block as one span."""
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(lane, name, begin, time.perf_counter_ns())

    def covered(self, lane: str) -> Intervals:
        """Return the intervals that the lane's spans cover, without overlaps."""
        return united((span.begin, span.end) for span in self.spans if span.lane == lane)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by lane.

        compute: without the waiting in it. hidden: communication, swap and gathering while the main thread was not
        waiting.
        """
        waiting = self.covered("waiting")
        behind = united(i for lane in ("gathering", "communication", "swap") for i in self.covered(lane))
        found = {lane: length(self.covered(lane)) for lane in LANES}
        found["compute"] -= length(common(self.covered("compute"), waiting))
        found["hidden"] = length(behind) - length(common(behind, waiting))
        return {name: nanoseconds / 1e9 for name, nanoseconds in found.items()}

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return Chrome's events of this rank, microseconds since ``origin``."""
        found: list[dict[str, Any]] = [_named("process_name", rank, 0, f"rank {rank}")]
        found += [_named("thread_name", rank, number, lane) for number, lane in enumerate(self._lanes, 1)]
        found.append({"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        for number, span in enumerate(sorted(self.spans, key=lambda span: span.begin)):
            begin, end = (span.begin - self.origin) / 1e3, (span.end - self.origin) / 1e3
            thread = 1 + self._lanes.index(span.lane)
            common_part = {"name": span.name, "cat": span.lane, "pid": rank, "tid": thread}
            if span.lane in _OVERLAPPING:
                one = {**common_part, "id2": {"local": f"0x{number:x}"}}
                found.append({**one, "ph": "b", "ts": begin, "args": span.args})
                found.append({**one, "ph": "e", "ts": end})
            else:
                found.append({**common_part, "ph": "X", "ts": begin, "dur": end - begin, "args": span.args})
        return found


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}


def united(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the same points in time, in order and without overlaps."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the intersection of two lists, each without overlaps."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)
