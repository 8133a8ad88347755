"""Measurement of the tuning table: `zcomm doctor --calibrate` starts this module as ranks of two worlds.

Each candidate is a separate communicator over the same ranks. Candidates are timed in turns, a round A B C A B C ...,
and the medians of the slowest rank decide. Source: docs/internals/algorithms.md, "One shot".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from zcomm.cli.calibration_ranks import answer, medians, run_ranks
from zcomm.machine.tuning import KINDS, Table, Tuning, save

if TYPE_CHECKING:
    from zcomm import Communicator, _core

_ROUNDS = 9
_SMALL_NBYTES = [1 << k for k in range(11, 17)]  # 2 to 64 KiB: the range of one-shot's limit
_SLOTS = [(64 << 10, 8), (128 << 10, 8), (256 << 10, 4), (512 << 10, 4)]
_LARGE_NBYTES = 16 << 20
_GAIN = 0.97  # a candidate must be this much faster than the built-in value to replace it


def calibrate(timeout_s: float = 120.0) -> Table:
    """Measure both kinds of worlds, save and return the table. Raises: RuntimeError with a rank's stderr."""
    cpus = len(os.sched_getaffinity(0))
    rows = {kind: _run(world, timeout_s) for kind, world in zip(KINDS, (max(2, min(cpus, 4)), 2 * cpus), strict=True)}
    file = save({kind: row for kind, row in rows.items() if row is not None})
    return Table(rows, f"measured now, kept in {file}")


def _run(world_size: int, timeout_s: float) -> Tuning:
    return Tuning(**json.loads(run_ranks("zcomm.cli.calibrate", world_size, 1, timeout_s)))


def _measure(job: Communicator) -> Tuning:
    default = Tuning()
    limit = max(_SMALL_NBYTES)
    one_shot = 0
    with _candidates(job, [Tuning(size, default.slot_nbytes, default.slot_count) for size in (0, limit)]) as pair:
        for nbytes in _SMALL_NBYTES:
            without, with_it = _seconds(job, pair, nbytes, 100)
            if with_it > without:
                break
            one_shot = nbytes
    with _candidates(job, [Tuning(one_shot, *slot) for slot in _SLOTS]) as slots:
        times = _seconds(job, slots, _LARGE_NBYTES, 1)
    best = times.index(min(times))
    built_in = _SLOTS.index((default.slot_nbytes, default.slot_count))
    if times[best] > _GAIN * times[built_in]:
        best = built_in
    return Tuning(one_shot, *_SLOTS[best])


@contextmanager
def _candidates(job: Communicator, tunings: Sequence[Tuning]) -> Iterator[list[_core.Communicator]]:
    """Open communicators that differ in one value."""
    from zcomm import _core

    cores = [_core.Communicator.create(job._joined.meshes[0], timeout_s=60.0, **asdict(each)) for each in tunings]
    yield cores
    for core in cores:
        core.close()


def _seconds(job: Communicator, cores: Sequence[_core.Communicator], nbytes: int, calls: int) -> list[float]:
    """Return the time of an all_reduce of ``nbytes`` fp32 by each candidate."""
    import torch

    from zcomm import _core

    data = torch.zeros(nbytes // 4)
    span = [(data.data_ptr(), data.numel())]
    return medians(
        job,
        [partial(core.all_reduce, span, _core.DType.float32, _core.ReduceOp.sum, "", False) for core in cores],
        _ROUNDS,
        calls,
    )


if __name__ == "__main__":
    answer(_measure)
