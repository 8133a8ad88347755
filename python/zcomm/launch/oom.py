"""Test for the kernel's out-of-memory killer after a SIGKILL: counters read before the job and after a rank's death.

The cgroup's counter is exact for this container or slice; /proc/vmstat counts the whole machine.
Source: kernel Documentation/admin-guide/cgroup-v2.rst (memory.events), cgroup-v1/memory.rst (memory.oom_control).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def counter_files(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return files with an `oom_kill` line that concern this process, the most exact first."""
    files: list[Path] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files.append(cgroup / path.lstrip("/") / "memory.events")
            files.append(cgroup / "memory.events")  # inside a container the path is often not visible, the root is
        elif "memory" in controllers.split(","):
            files.append(cgroup / "memory" / path.lstrip("/") / "memory.oom_control")
    files.append(proc / "vmstat")
    return [f for f in dict.fromkeys(files) if read_counter(f) is not None]


def read_counter(file: Path) -> int | None:
    """Return the number on the `oom_kill` line, or None if there is none."""
    try:
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        pass
    return None


class OomWatch:
    """Counters of out-of-memory kills at the start; `risen()` names the first that has risen since."""

    def __init__(self, files: Sequence[Path] | None = None) -> None:
        self._start = {f: read_counter(f) or 0 for f in (counter_files() if files is None else files)}

    def risen(self) -> Path | None:
        """Return the first file with a risen count of out-of-memory kills, or None."""
        for file, before in self._start.items():
            if (read_counter(file) or 0) > before:
                return file
        return None
