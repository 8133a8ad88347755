"""Block size and depth of swap files, measured once per drive.

``zcomm doctor --calibrate --dir D`` measures the drive of D in some seconds. It keeps the result as JSON in the user's
cache (mode 0600), by the drive's identity. ``SwapFile`` uses it if neither argument is given. Without it, built-in
values serve. ``ZCOMM_SWAP_TUNING`` names another file. It changes times, never bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zcomm.machine import tuning

FORMAT = 1
_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True)
class SwapTuning:
    """Requests of a swap file: ``block_nbytes`` of one, ``depth`` in flight per drive; ``origin``: their source."""

    block_nbytes: int = 1 << 20
    depth: int = 32
    origin: str = "built in"

    def usable(self) -> bool:
        """Return True if the values are valid for a swap file, because a cache file may hold anything."""
        block: object = self.block_nbytes
        depth: object = self.depth
        if not isinstance(block, int) or not isinstance(depth, int):
            return False
        return 4096 <= block <= 64 << 20 and block % 4096 == 0 and 1 <= depth <= 4096


def path() -> Path:
    """Return the path of the file of the measured values."""
    if "ZCOMM_SWAP_TUNING" in os.environ:
        return Path(os.environ["ZCOMM_SWAP_TUNING"])
    return tuning.path().with_name("swap.json")


def drive(directory: str | os.PathLike[str]) -> str | None:
    """Identify the drive of a directory; None if its file system has no drive (network, RAM).

    The identity is model, size, and wwid or serial number, because names such as sda may change.
    """
    place = Path(directory)
    if not place.exists():
        place = place.parent  # SwapFile creates the last part
    try:
        number = os.stat(place).st_dev
        disk = (_DEVICES / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    disk = disk if (disk / "queue").exists() else disk.parent  # a partition's disk
    words = [_line(disk / "size") + " sectors"]
    for name, files in {"model": ("device/model",), "id": ("wwid", "device/wwid", "serial", "device/serial")}.items():
        found = next(filter(None, (_line(disk / file) for file in files)), "")
        if found:
            words.append(f"{name} {found}")
    return ", ".join(words if len(words) > 1 else [disk.name, *words])


def _line(file: Path) -> str:
    try:
        return " ".join(file.read_text().split())
    except (OSError, ValueError):
        return ""


def load(directory: str | os.PathLike[str]) -> SwapTuning:
    """Load the measured values of this directory's drive, or the built-in values; never raises."""
    try:
        file = path()
    except RuntimeError as error:  # no home directory
        return SwapTuning(origin=f"built in (no cache: {error})")
    try:
        key = drive(directory)
        if key is None:
            return SwapTuning(origin="built in (no drive of its own)")
        row = json.loads(file.read_text())["drives"].get(key)
        if row is None:
            return SwapTuning()
        measured = SwapTuning(row["block_nbytes"], row["depth"], f"measured {row['time']}")
        return measured if measured.usable() else SwapTuning(origin=f"built in ({file} holds unusable values)")
    except FileNotFoundError:
        return SwapTuning()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return SwapTuning(origin=f"built in ({file} cannot be used: {type(error).__name__}: {error})")


def save(directory: str | os.PathLike[str], found: SwapTuning, speeds: dict[str, float]) -> Path | None:
    """Save a drive's values, keeping other drives' values; None without a drive. Raises: OSError."""
    key = drive(directory)
    if key is None:
        return None
    file = path()
    try:
        drives: dict[str, Any] = dict(json.loads(file.read_text())["drives"])
    except (OSError, ValueError, KeyError, TypeError):
        drives = {}
    row = asdict(found)
    del row["origin"]
    drives[key] = {**row, **speeds, "time": tuning.today()}
    return tuning.keep(file, {"format": FORMAT, "drives": drives}, mode=0o600)
