"""Timing variants in turn.

A figure is the median of >= 7 rounds. In each round every variant runs once, each started by a barrier, so that a
machine that slows down slows all of them. Their order is drawn for each round (alike on all ranks), because a variant
changes caches and heap for the next one. A round's time is the slowest rank's. Percentiles are over all single calls of
a rank, and the slowest rank's are kept.
"""

from __future__ import annotations

import itertools
import random
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

MIN_ROUNDS = 7
PERCENTILES = (50, 95, 99)

Calls = Mapping[str, Callable[[], object]]


@dataclass(frozen=True)
class Timing:
    """Seconds. `median`: of rounds, per call; `percentiles`: of single calls, in the order of PERCENTILES.

    `quiet`: first quartile of rounds, those that nothing else disturbed. `faults`: page faults of a call (median of
    rounds, of the rank that has most).
    """

    median: float
    percentiles: tuple[float, ...]
    quiet: float = 0.0
    faults: float = 0.0


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least `percent` of the values do not exceed (nearest rank)."""
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
    """Time each variant. `inner` calls make one round; `gather` gives each rank the lists of all ranks.

    settle: waits for a device; its time belongs to the round, and to its last call.
    """
    rounds = max(MIN_ROUNDS, rounds)
    clock = time.perf_counter
    rounds_of: dict[str, list[float]] = {name: [] for name in variants}
    faults_of: dict[str, list[float]] = {name: [] for name in variants}
    calls_of: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        for _ in range(warmup):
            call()
    if settle is not None:
        settle()
    order, draw = list(variants), random.Random(1)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            call = variants[name]
            stamps = [0.0] * (inner + 1)
            barrier()
            faults = _faults()
            stamps[0] = clock()
            for i in range(1, inner + 1):
                call()
                stamps[i] = clock()
            if settle is not None:
                settle()
                stamps[-1] = clock()
            faults_of[name].append((_faults() - faults) / inner)
            rounds_of[name].append((stamps[-1] - stamps[0]) / inner)
            calls_of[name].extend(end - begin for begin, end in itertools.pairwise(stamps))
    result = {}
    for name, mine in rounds_of.items():
        ordered = sorted(calls_of[name])
        faults = statistics.median(faults_of[name])
        all_lists = gather([*mine, *(percentile(ordered, percent) for percent in PERCENTILES), faults])
        columns = [max(column) for column in zip(*all_lists, strict=True)]
        quiet, *_ = statistics.quantiles(columns[:rounds], n=4)
        median = statistics.median(columns[:rounds])
        result[name] = Timing(median, tuple(columns[rounds:-1]), quiet=quiet, faults=columns[-1])
    return result


def _faults() -> int:
    """Return the page faults of this process without a read from a drive."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
