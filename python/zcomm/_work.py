"""Work: the handle of an asynchronous operation, with the tensors it needs kept alive."""

from __future__ import annotations

from typing import Any, Protocol


class _CoreWork(Protocol):
    def wait(self, timeout: float | None = None) -> None: ...
    def done(self) -> bool: ...


class Work:
    """An operation in flight. ``wait()`` rethrows its error, ``done()`` polls; dropping it waits.

    Thread rule: one thread at a time. Reading or changing the tensors before ``wait()`` returned is a race.
    """

    __slots__ = ("_core", "_keep_alive")

    def __init__(self, core: _CoreWork, keep_alive: Any = None) -> None:
        self._core = core
        self._keep_alive = keep_alive

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation ended.

        timeout: seconds; None waits for the operation's own deadline.
        Raises: TimeoutError when ``timeout`` passes first (the operation goes on), or the operation's error.
        """
        self._core.wait(timeout)
        self._keep_alive = None

    def done(self) -> bool:
        """Whether the operation ended (well or not); never blocks."""
        return self._core.done()
