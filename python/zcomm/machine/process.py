"""Processes of this machine, identified by pid and start time, because pids are reused. Imports no torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` from the third one, the state, on. Raises: OSError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def start_of(pid: int) -> str | None:
    """Return when a process started, in clock ticks after the boot; None if there is none."""
    try:
        fields = stat_of(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True)
class Process:
    """A process, as another process names it or looks for it."""

    node: str
    pid: int
    started: str  # clock ticks after the boot
    space: str  # kernel boot and process namespace of ``pid``

    @staticmethod
    @cache
    def _own(pid: int) -> Process:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        return Process(socket.gethostname(), pid, start_of(pid) or "", space)

    @staticmethod
    def own() -> Process:
        return Process._own(os.getpid())  # a forked child is another one

    def is_dead(self) -> bool:
        """Return True if the process is known to have ended."""
        return self.space == Process.own().space and start_of(self.pid) != self.started

    def is_collected(self) -> bool:
        """Return True if the process has ended and was reaped, or if it is in another namespace."""
        if self.space != Process.own().space:
            return True
        try:
            return stat_of(self.pid)[19] != self.started
        except OSError:
            return True

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node}"
