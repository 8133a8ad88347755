"""Planning: the cost of a model in each stage, tier and world, before anything is started (``zcomm plan``)."""

from __future__ import annotations

from zcomm.planning.activations import TrueConditions, saved_nbytes
from zcomm.planning.estimate import DriveBytes, Estimate, drive_nbytes, estimate
from zcomm.planning.gathers import as_arguments, gathered_count, gathered_nbytes
from zcomm.planning.live_memory import LiveMemory, live_memory
from zcomm.planning.planned_offload import PlannedOffload
from zcomm.planning.step_time import StepTime, step_time, swap_seconds
from zcomm.planning.work import Work, work_of

__all__ = [
    "DriveBytes",
    "Estimate",
    "LiveMemory",
    "PlannedOffload",
    "StepTime",
    "TrueConditions",
    "Work",
    "as_arguments",
    "drive_nbytes",
    "estimate",
    "gathered_count",
    "gathered_nbytes",
    "live_memory",
    "saved_nbytes",
    "step_time",
    "swap_seconds",
    "work_of",
]
