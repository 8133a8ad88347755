"""Counts this process's file system operations and kills it, with SIGKILL, at the n-th.

Everything goes through names of ``os`` (open for writing, pwrite, fsync, mkdir, rename, replace, unlink, rmdir) and
through ``durable._exchange`` (renameat2 by ctypes). Every operation is a point just before it, every write one more in
its middle, with half of the bytes written. Install it in a process that may die.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from zcomm.zero.files import durable

Point = tuple[str, str]  # operation, name of its file
_WRITING = os.O_WRONLY | os.O_RDWR


def count_and_kill(kill_at: int, exchange: bool = True) -> list[Point]:
    """Count from now on; return the growing list. kill_at: 1 is the first point, 0 never kills.

    exchange: False: the file system cannot exchange two names.
    """
    points: list[Point] = []
    names: dict[int, str] = {}

    def at(operation: str, name: str) -> None:
        points.append((operation, name))
        if len(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def base(path: Any) -> str:
        return os.path.basename(os.fsdecode(path).rstrip("/"))

    def wrapped(operation: str) -> Callable[..., Any]:
        original = getattr(os, operation)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            at(operation, base(path))
            return original(path, *args, **kwargs)

        return call

    real_open, real_write, real_fsync = os.open, os.pwrite, os.fsync

    def open_(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & _WRITING:
            at("open", base(path))
        descriptor = real_open(path, flags, *args, **kwargs)
        names[descriptor] = base(path)
        return descriptor

    def write(descriptor: int, data: Any, offset: int) -> int:
        at("write", names.get(descriptor, "?"))
        view = memoryview(data)
        done = real_write(descriptor, view[: len(view) // 2], offset)
        at("write more", names.get(descriptor, "?"))
        return done + real_write(descriptor, view[done:], offset + done)

    def fsync(descriptor: int) -> None:
        at("fsync", names.get(descriptor, "?"))
        real_fsync(descriptor)

    for operation in ("mkdir", "rename", "replace", "unlink", "rmdir"):
        setattr(os, operation, wrapped(operation))
    real_exchange = durable._exchange

    def exchanged(one: Any, other: Any) -> bool:
        if not exchange:
            return False
        at("exchange", base(one))
        return real_exchange(one, other)

    os.open, os.pwrite, os.fsync, durable._exchange = open_, write, fsync, exchanged  # type: ignore[assignment]
    return points
