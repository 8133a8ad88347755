"""Tuning: the sizes by which shared-memory collectives choose their algorithm, measured once per machine.

A table has one row for ranks that have a CPU each and one for ranks that share CPUs. ``zcomm doctor --calibrate``
measures it in some seconds and keeps it as JSON in the user's cache. ``init`` reads it on rank 0, and its values serve
all ranks. Without a table of this machine, built-in values serve. ``ZCOMM_TUNING`` names another file.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zcomm.machine.new_file import replacing


@dataclass(frozen=True)
class Tuning:
    """Sizes of a kind of world.

    Up to ``one_shot_nbytes`` an operation's data travels with its start; longer private data goes through the slots.
    """

    one_shot_nbytes: int = 16 << 10
    slot_nbytes: int = 256 << 10
    slot_count: int = 4


@dataclass(frozen=True)
class Table:
    """Table of ``rows`` by kind of world (see ``kind_of_world``); ``origin``: their source."""

    rows: Mapping[str, Tuning]
    origin: str

    def row(self, world_size: int) -> Tuning:
        return self.rows.get(kind_of_world(world_size), Tuning())


KINDS = ("own_cpu", "shared_cpu")


def kind_of_world(world_size: int) -> str:
    """Return the kind of world: whether ``world_size`` ranks on this host have a CPU each."""
    return "own_cpu" if world_size <= len(os.sched_getaffinity(0)) else "shared_cpu"


def machine() -> str:
    """Describe the machine that a table is valid for: CPU model, number of CPUs, kernel."""
    model = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} CPUs, Linux {platform.release()}"


def path() -> Path:
    """Return the path of the table."""
    if "ZCOMM_TUNING" in os.environ:
        return Path(os.environ["ZCOMM_TUNING"])
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "zcomm" / "tuning.json"


def load() -> Table:
    """Load the table of this machine, or the built-in values; never raises."""
    try:
        file = path()
    except RuntimeError as error:  # no home directory
        return Table({}, f"built in (no cache: {error})")
    try:
        text = json.loads(file.read_text())
        if text["machine"] != machine():
            return Table({}, f"built in ({file} is of another machine: {text['machine']})")
        return Table({kind: Tuning(**row) for kind, row in text["rows"].items()}, f"measured {text['time']}")
    except FileNotFoundError:
        return Table({}, "built in")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return Table({}, f"built in ({file} cannot be used: {type(error).__name__}: {error})")


def save(rows: Mapping[str, Tuning]) -> Path:
    """Keep a measured table; return its file. Raises: OSError."""
    return keep(
        path(), {"machine": machine(), "time": today(), "rows": {kind: asdict(row) for kind, row in rows.items()}}
    )


def keep(file: Path, content: dict[str, Any], mode: int = 0o666) -> Path:
    """Replace a file of the user's cache as a whole, and return it. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(file, mode) as descriptor, open(descriptor, "w", closefd=False) as stream:
        stream.write(json.dumps(content, indent=1) + "\n")
    return file


def today() -> str:
    """Return the date of a measurement, as it is kept and shown."""
    return time.strftime("%Y-%m-%d")
