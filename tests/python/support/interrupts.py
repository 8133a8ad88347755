"""Interrupts at chosen moments of Python code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def _in_del(frame: FrameType | None) -> bool:
    """Return whether the frame runs in a __del__: Python prints errors raised in it, and continues."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def leaves_a_block(frame: FrameType) -> bool:
    """Return True if the line may be the end of a with block.

    Python raises no signal's error between the block's last line and its __exit__, so the __exit__ would be skipped.
    """
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


def interrupted_at(moment: int, action: Callable[[], object], files: tuple[str, ...] = ("",)) -> bool:
    """Run ``action`` and interrupt it at this line of Python code, counted over all functions that it calls.

    Returns: False if it ended before. files: parts of file names; code of other files is not interrupted.
    """
    left = moment

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal left
        if event == "call" and (not any(part in frame.f_code.co_filename for part in files) or _in_del(frame)):
            return None
        if event == "line" and not leaves_a_block(frame):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def lines_of(action: Callable[[], object], files: tuple[str, ...]) -> int:
    """Run ``action`` and count the moments that ``interrupted_at`` has for it."""
    moments = 0

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal moments
        if event == "call" and (not any(part in frame.f_code.co_filename for part in files) or _in_del(frame)):
            return None
        moments += event == "line" and not leaves_a_block(frame)
        return trace

    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(None)
    return moments
