"""Seconds of a training step on this machine: computing, communication, update and swap, from measured speeds.

[Note: step time] Forward and backward follow the roofline of each operation. Communication: a gradient's hook copies
the part that other ranks reduce into its slot, and the buckets go through reduce_scatter, per micro-step. Ranks of a
host share their parameters, so a barrier publishes them; private copies (stage 0) are gathered. Update: the bytes of
one pass over gradients, weights and state, and of the norm, as in a step that clips. Swapping of state overlaps the
update, swapping of parameters overlaps computing. Nothing else is assumed hidden, because ranks that leave no CPU idle
delay their computing by communication. It is a model: expect errors of tens of percent, and the right order of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from zcomm.machine.speeds import Speeds
from zcomm.planning.estimate import Estimate
from zcomm.planning.work import Work

_HOOK_STARTS = 3  # measured: a gradient's hook takes as long as the start of so many operations


@dataclass(frozen=True)
class StepTime:
    """Seconds per optimizer step; swap as if nothing hid it. compute: None without a traced micro-batch."""

    compute_s: float | None
    communication_s: float
    update_s: float
    swap_s: float
    step_s: float | None


def step_time(
    found: Estimate,
    speeds: Speeds,
    work: Work | None,
    precision: str,
    accumulation: int = 1,
    drive_bps: tuple[float, float] | None = None,
) -> StepTime | None:
    """Compute the seconds of a step.

    drive_bps: bytes per second read and written, which the ranks share; None if it was not measured.

    Returns: None if the case swaps and the drive was not measured.
    """
    read, written = found.swap_param_nbytes
    of_params = swap_seconds(found.world_size, read, written, drive_bps)
    read, written = found.swap_read_nbytes - read, found.swap_written_nbytes - written
    of_state = swap_seconds(found.world_size, read, written, drive_bps)
    if of_params is None or of_state is None:
        return None
    compute = None if work is None else accumulation * work.seconds(speeds, precision)
    copied = found.bucket_nbytes * (1 - 1 / found.world_size)
    reduced = found.bucket_nbytes / speeds.reduce_bps + 2 * copied / speeds.far_bps
    communication = accumulation * (reduced + _HOOK_STARTS * found.tensors * speeds.start_s)
    communication += found.published_nbytes / speeds.reduce_bps
    update = found.update_nbytes / speeds.far_bps
    step = None if compute is None else max(compute + communication, of_params) + max(update, of_state)
    return StepTime(compute, communication, update, of_params + of_state, step)


def swap_seconds(
    world_size: int, read_nbytes: float, written_nbytes: float, drive_bps: tuple[float, float] | None
) -> float | None:
    """Return the drive's seconds for these bytes of each rank; None for bytes without a known rate."""
    if not read_nbytes + written_nbytes:
        return 0.0
    return None if drive_bps is None else world_size * (read_nbytes / drive_bps[0] + written_nbytes / drive_bps[1])
