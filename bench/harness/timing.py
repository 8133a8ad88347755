"""Timing variants in turn.

A figure is the median of >= 7 rounds. In each round every variant runs once, A B C D A B C D ..., each started by a
barrier, so that a machine that slows down slows all of them. A round's time is that of the slowest rank. Percentiles
are over all single calls of a rank, and those of the slowest rank are kept.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIN_ROUNDS = 7
PERCENTILES = (50, 95, 99)

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Seconds. `median`: of rounds, per call; `percentiles`: of single calls, in the order of PERCENTILES."""

    median: float
    percentiles: tuple[float, ...]


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of the values do not exceed (nearest rank)."""
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


def interleaved(
    variants: Calls,
    rounds: int,
    inner: int,
    warmup: int,
    barrier: Callable[[], object],
    gather: Callable[[list[float]], list[list[float]]],
    settle: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Times each variant. `inner` calls make one round; `gather` gives everybody the lists of all ranks.

    settle: waits for a device; its time belongs to the round, and to its last call.
    """
    rounds = max(MIN_ROUNDS, rounds)
    clock = time.perf_counter
    rounds_of: dict[str, list[float]] = {name: [] for name in variants}
    calls_of: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(warmup):
            call()
    if settle is not None:
        settle()
    for _ in range(rounds):
        for name, call in variants.items():
            stamps = [0.0] * (inner + 1)
            barrier()
            stamps[0] = clock()
            for i in range(1, inner + 1):
                call()
                stamps[i] = clock()
            if settle is not None:
                settle()
                stamps[-1] = clock()
            rounds_of[name].append((stamps[-1] - stamps[0]) / inner)
            calls_of[name].extend(end - begin for begin, end in itertools.pairwise(stamps))
    result = {}
    for name, mine in rounds_of.items():
        ordered = sorted(calls_of[name])
        everyone = gather(mine + [percentile(ordered, percent) for percent in PERCENTILES])
        columns = [max(column) for column in zip(*everyone, strict=True)]
        result[name] = Timing(statistics.median(columns[:rounds]), tuple(columns[rounds:]))
    return result
