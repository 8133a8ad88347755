"""Place of a thread: the call of zcomm that it is in, and the line of the program that made it.

[Note: no frame is held] ``sys._current_frames`` would hold frames of other threads, and so free their objects late, and
on another thread. ``faulthandler`` writes their names at once, and holds nothing.
"""

from __future__ import annotations

import faulthandler
import os
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Parts of zcomm that wait for ranks, and for a drive, and functions elsewhere that wait. The rest computes.
_RANKS = ("comm", "bootstrap", "backends", "torch_backend")
_DRIVES = (os.path.join("zero", "cache", ""), os.path.join("memory", "swap_file.py"))
_WAITS = ("wait", "_wait", "finish", "synchronize", "ensure", "result")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_MOST_NBYTES = 1 << 18

Frame = tuple[str, str, str]  # file, line, function


class Place(NamedTuple):
    """phase: "compute", "communication" or "swap". operation: "" outside of zcomm. site: a line, as "train.py:42"."""

    phase: str = "compute"
    operation: str = ""
    site: str = ""


class Looker:
    """Sampler of a thread of this process. thread: its identifier, which can be set."""

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._file = os.memfd_create("zcomm-place", os.MFD_CLOEXEC)

    def look(self) -> Place:
        """Return the thread's place."""
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        text = os.pread(self._file, _MOST_NBYTES, 0).decode("utf-8", "replace")
        return place_in(_frames(text, f"Thread 0x{self.thread:016x}"))

    def close(self) -> None:
        """Close the file that stacks are written to."""
        os.close(self._file)


def _frames(text: str, head: str) -> Iterator[Frame]:
    """Yield the frames of one thread, innermost first."""
    inside = False
    for line in text.splitlines():
        found = _FRAME.fullmatch(line)
        if found is None:
            inside = line.startswith(head)
        elif inside:
            yield found[1], found[2], found[3]


def place_in(frames: Iterable[Frame]) -> Place:
    """Return the place of a stack, innermost frame first."""
    phase, public, private, by_torch = "", "", "", ""
    for file, line, name in frames:
        if file.startswith(_PACKAGE):
            phase, private = phase or _phase(file[len(_PACKAGE) :], name), private or name
            public = public if name.startswith("_") else name
        elif not _is_library(file):
            operation = public or (private and (by_torch or private.strip("_")))
            return Place(phase or "compute", operation, f"{os.path.basename(file)}:{line}")
        elif name in ("backward", "forward"):
            public, by_torch = "", name  # zcomm was called by a hook
        else:
            phase = phase or "compute"  # torch computes, or the standard library
    return Place(phase or "compute", public or by_torch)


def _phase(file: str, function: str) -> str:
    if file.startswith(_DRIVES):
        return "swap"
    return "communication" if file.partition(os.sep)[0] in _RANKS or function in _WAITS else "compute"


def _is_library(file: str) -> bool:
    return file.startswith(("<", _STDLIB)) or "-packages" + os.sep in file
