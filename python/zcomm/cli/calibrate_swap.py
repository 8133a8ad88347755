"""Choice of a drive's block size and depth: `zcomm doctor --calibrate --dir D`, some seconds and 768 MiB of its space.

Each candidate is a separate swap file. All are timed in turns, one write and one read each, and the median of the sum
decides. Two files on one drive differ by some percent, so a candidate must be clearly better than the built-in values.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from pathlib import Path

import torch

from zcomm.machine import swap_tuning
from zcomm.machine.swap_tuning import SwapTuning
from zcomm.memory.swap_file import SwapFile, pinned_empty

_NBYTES = 128 << 20
_ROUNDS = 5
_PATIENCE_S = 12.0  # a slow drive has fewer rounds, at least two
_GAIN = 0.95
_CANDIDATES = (
    SwapTuning(),
    SwapTuning(1 << 20, 16),
    SwapTuning(1 << 20, 64),
    SwapTuning(256 << 10, 64),
    SwapTuning(2 << 20, 16),
    SwapTuning(4 << 20, 8),
)


def calibrate(directory: Path, nbytes: int = _NBYTES) -> SwapTuning:
    """Measure, save and return the choice. Raises: OSError (no space, not writable)."""
    times: list[list[tuple[float, float]]] = [[] for _ in _CANDIDATES]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zcomm-calibrate-", dir=directory))
        files = [
            stack.enter_context(SwapFile(folder, nbytes, block_nbytes=each.block_nbytes, depth=each.depth))
            for each in _CANDIDATES
        ]
        data = pinned_empty(nbytes, torch.uint8)
        data.view(torch.int64).random_()
        for file in files:
            file.write("calibration", data).wait()  # so that timed writes overwrite
        begin_s = time.perf_counter()
        for turn in range(_ROUNDS):
            if turn >= 2 and time.perf_counter() - begin_s > _PATIENCE_S:
                break
            for number in range(len(files)) if turn % 2 == 0 else reversed(range(len(files))):
                times[number].append(_once(files[number], data))
    sums = [statistics.median(map(sum, each)) for each in times]
    best = sums.index(min(sums))
    if sums[best] > _GAIN * sums[0]:
        best = 0
    write_s, read_s = (statistics.median(column) for column in zip(*times[best], strict=True))
    found = _CANDIDATES[best]
    speeds = {"write_gbps": nbytes / write_s / 1e9, "read_gbps": nbytes / read_s / 1e9}
    kept = swap_tuning.save(directory, found, speeds)
    origin = f"measured now, kept in {kept}" if kept else "measured, not kept: no drive of its own"
    return SwapTuning(found.block_nbytes, found.depth, origin)


def _once(file: SwapFile, data: torch.Tensor) -> tuple[float, float]:
    stamps = [time.perf_counter()]
    for work in (file.write, file.read):
        work("calibration", data).wait()
        stamps.append(time.perf_counter())
    return stamps[1] - stamps[0], stamps[2] - stamps[1]
