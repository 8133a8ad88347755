"""Speeds of the GPUs of this machine, measured once by ``zcomm doctor --calibrate``, for ``zcomm plan``.

The file lies next to the tuning table, and has a row for each model of a GPU.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zcomm.machine import tuning

FORMAT = 1


@dataclass(frozen=True)
class GpuSpeeds:
    """Speeds of one GPU. flops: of forward and backward of transformer blocks in bf16 (FLOP/s). down_bps, up_bps:
    bytes per second between pinned host memory and the GPU, from and to it, both at once."""

    flops: float
    down_bps: float
    up_bps: float


def path() -> Path:
    """Return the path of the file of the speeds."""
    return tuning.path().with_name("gpus.json")


def load(name: str) -> GpuSpeeds | None:
    """Load the speeds of the GPU with torch's or NVML's ``name``; None if it was not measured on this machine."""
    row = _rows().get(name)
    try:
        return None if row is None else GpuSpeeds(**row)
    except TypeError:
        return None


def save(name: str, found: GpuSpeeds) -> Path:
    """Keep the speeds of one GPU next to the others'; return their file. Raises: OSError."""
    about = {"format": FORMAT, "machine": tuning.machine(), "time": tuning.today()}
    return tuning.keep(path(), {**about, "gpus": {**_rows(), name: asdict(found)}})


def _rows() -> dict[str, Any]:
    try:
        text = json.loads(path().read_text())
        if text["machine"] == tuning.machine() and text["format"] == FORMAT:
            return dict(text["gpus"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        pass
    return {}
