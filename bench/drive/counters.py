"""Counters of the block device itself: bytes that the page cache served are not in them."""

from __future__ import annotations

import os
from pathlib import Path

_SECTOR_NBYTES = 512  # of the kernel's counters, whatever the drive's


def _device(folder: Path) -> Path | None:
    number = os.stat(folder).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return device if (device / "stat").exists() else None


def moved(folder: Path) -> tuple[int, int] | None:
    """Return the bytes read and written so far; None if the file system has no block device (overlay, network)."""
    device = _device(folder)
    if device is None:
        return None
    fields = (device / "stat").read_text().split()
    return int(fields[2]) * _SECTOR_NBYTES, int(fields[6]) * _SECTOR_NBYTES


def describe(folder: Path) -> str:
    """Return the drive in words."""
    device = _device(folder)
    if device is None:
        return "a file system without a block device of its own: moved/asked is not known"
    disk = device.resolve()
    disk = disk if (disk / "queue").exists() else disk.parent  # a partition's disk
    words = [disk.name]
    for name, file in (
        ("model", "device/model"),
        ("scheduler", "queue/scheduler"),
        ("max KiB", "queue/max_sectors_kb"),
    ):
        if (disk / file).exists():
            words.append(f"{name} {(disk / file).read_text().strip()}")
    return ", ".join(words)
