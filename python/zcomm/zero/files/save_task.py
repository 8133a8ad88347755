"""SaveTask: a checkpoint that is written while training continues."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from concurrent import futures
from concurrent.futures import Future
from typing import Any


class SaveTask:
    """Files that are being written while training continues. ``await task`` works, too."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self._was_reported = False
        self._pid = os.getpid()

    def done(self) -> bool:
        """Return True once it has ended, with or without an error."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the folder is in its place.

        Raises: the errors of save(); TimeoutError (the save continues); RuntimeError in a forked child.
        """
        if os.getpid() != self._pid and not self._future.done():
            raise RuntimeError("this process was forked from the one that saves; only the parent can wait for the save")
        try:
            self._future.result(timeout)
        except futures.TimeoutError:  # before Python 3.11 not the built-in one
            if self._future.done():  # the save's own
                raise
            raise TimeoutError(f"the save is not done after {timeout} s; it goes on") from None
        finally:
            self._was_reported = self._future.done()

    def end(self) -> None:
        """Wait, and raise the save's error unless ``wait()`` has raised it already."""
        if not self._was_reported:
            self.wait()

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()
        finally:
            self._was_reported = self._future.done()
