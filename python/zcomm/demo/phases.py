"""Phases of a step, forward, backward and ``step()``: the time of each next to its bound, compute or the drive.

The passes of a pipeline are one phase.

Two times bound a phase, and the larger counts: rank 0's computing, and the drive's work for the bytes of all ranks. The
drive's rates are measured without other load; it reads or writes at one time, so these times add up. A phase may write
bytes of the previous phase, so a single step can be below its bound. The sum over steps is not, except for noise.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.memory.swap_file import SwapFile, pinned_empty

NAMES, OF_STAGES = ("forward", "backward", "step"), ("passes", "step")
BOUND_HEADINGS = ("phase", "seconds", "least", "bound by", "GB read", "GB written")
AXIS_HEADINGS = ("axes", "ranks", "calls", "bytes", "planned")
_PROBE_NBYTES = 64 << 20
_PROBE_ROUNDS = 3


@dataclass(frozen=True)
class DriveRates:
    """Bytes per second of a drive without other load: read and written."""

    read: float
    written: float

    def seconds(self, read_nbytes: float, written_nbytes: float) -> float:
        """Return how long the drive needs for these bytes."""
        return read_nbytes / self.read + written_nbytes / self.written


@dataclass
class Phase:
    """One phase of a step on rank 0. seconds: of the clock; waited_s: of these, for ranks or the drive."""

    seconds: float = 0.0
    waited_s: float = 0.0
    read_nbytes: float = 0.0
    written_nbytes: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds that are not waiting."""
        return max(0.0, self.seconds - self.waited_s)

    def __add__(self, other: Phase) -> Phase:
        return Phase(
            self.seconds + other.seconds,
            self.waited_s + other.waited_s,
            self.read_nbytes + other.read_nbytes,
            self.written_nbytes + other.written_nbytes,
        )


@dataclass(frozen=True)
class Bound:
    """The time that a phase takes, and the least that it could. by: "compute" or "drive"."""

    name: str
    seconds: float
    least_s: float
    by: str

    @property
    def share(self) -> float:
        """The least time over the time taken, 1 at the bound."""
        return min(1.0, self.least_s / self.seconds) if self.seconds > 0 else 1.0


class Clock:
    """Times the phases of one step. stats: counters as ``ZeroOptimizer.stats``. wait: for a phase's work on a GPU."""

    def __init__(self, stats: Callable[[], dict[str, float]], wait: Callable[[], None] = lambda: None) -> None:
        self._stats, self._wait = stats, wait
        self.phases: dict[str, Phase] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds and bytes to the phase of this name."""
        before, started = self._stats(), time.perf_counter()
        yield
        self._wait()
        seconds, after = time.perf_counter() - started, self._stats()
        waited, read, written = (
            sum(after[key] - before[key] for key in keys)
            for keys in (("comm_s", "swap_s"), ("swap_read_nbytes",), ("swap_written_nbytes",))
        )
        self.phases[name] = self.phases.get(name, Phase()) + Phase(seconds, waited, read, written)


def bounds(phases: Sequence[dict[str, Any]], world_size: int, rates: DriveRates | None) -> list[Bound]:
    """Return the bound of each phase, in order, from its sums over steps. phases: of each step, by name, as dicts."""
    found = []
    for name in OF_STAGES if any("passes" in of_step for of_step in phases) else NAMES:
        total = sum((Phase(**each[name]) for each in phases if name in each), Phase())
        drive_s = 0.0
        if rates is not None:
            drive_s = rates.seconds(world_size * total.read_nbytes, world_size * total.written_nbytes)
        by = "drive" if drive_s > total.compute_s else "compute"
        found.append(Bound(name, total.seconds, max(drive_s, total.compute_s), by))
    return found


def measure_drive(folders: Sequence[str], nbytes: int = _PROBE_NBYTES) -> DriveRates:
    """Measure the drives with a temporary swap file of ``nbytes``. Raises: OSError."""
    with ExitStack() as stack:
        inside = [stack.enter_context(tempfile.TemporaryDirectory(prefix="zcomm-demo-", dir=each)) for each in folders]
        data = pinned_empty(nbytes, torch.uint8)
        data.view(torch.int64).random_()
        with SwapFile(inside, nbytes) as file:
            file.write("probe", data).wait()  # so that timed writes overwrite
            times = [[_seconds(work, data) for work in (file.read, file.write)] for _ in range(_PROBE_ROUNDS)]
    read_s, write_s = (min(column) for column in zip(*times, strict=True))
    return DriveRates(nbytes / read_s, nbytes / write_s)


def _seconds(work: Callable[[str, torch.Tensor], Any], data: torch.Tensor) -> float:
    started = time.perf_counter()
    work("probe", data).wait()
    return time.perf_counter() - started
