"""Speeds of this machine, measured once, by which ``zcomm plan`` converts operations and bytes to seconds.

A row per world size: all its ranks worked at the same time, each with its part of the CPUs. ``zcomm doctor
--calibrate`` measures them and saves them as JSON next to the tuning table. They change no training, only plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zcomm.machine import tuning

FORMAT = 2  # 2: the slowdown counts the start of views, too


@dataclass(frozen=True)
class Speeds:
    """Speeds of one of ``world_size`` ranks that all work.

    flops: of matrix products, by dtype (FLOP/s).
    near_bps, far_bps: bytes per second that a simple operation reads and writes, from cache (near) and memory (far).
    start_s: seconds to start an operation.
    reduce_bps: bytes per second of a bucket through reduce_scatter.
    slowdown: measured time of a transformer's block over its time by these speeds (softmax, strides).
    """

    world_size: int
    flops: Mapping[str, float]
    near_bps: float
    far_bps: float
    start_s: float
    reduce_bps: float
    slowdown: float = 1.0

    def of_world(self, world_size: int) -> Speeds:
        """Return the speeds of one of another number of ranks: they share the machine."""
        part = self.world_size / world_size
        flops = {name: value * part for name, value in self.flops.items()}
        return replace(
            self,
            world_size=world_size,
            flops=flops,
            near_bps=self.near_bps * part,
            far_bps=self.far_bps * part,
            reduce_bps=self.reduce_bps * part,
        )


def path() -> Path:
    """Return the path of the file of the speeds."""
    return tuning.path().with_name("speeds.json")


def load(world_size: int) -> Speeds | None:
    """Load the speeds of a rank of such a world, from the nearest one measured on this machine; None without any."""
    try:
        text = json.loads(path().read_text())
        if text["machine"] != tuning.machine() or text["format"] != FORMAT:
            return None
        rows = [Speeds(**row) for row in text["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not rows:
        return None
    alone = [row for row in rows if (row.world_size == 1) == (world_size == 1)] or rows
    return min(alone, key=lambda row: abs(row.world_size - world_size)).of_world(world_size)


def save(rows: list[Speeds]) -> Path:
    """Keep measured rows; returns their file. Raises: OSError."""
    about = {"format": FORMAT, "machine": tuning.machine(), "time": tuning.today()}
    return tuning.keep(path(), {**about, "rows": [asdict(row) for row in rows]})
