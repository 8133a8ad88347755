"""Threads that serve the Futures of process groups: started at need, gone when they have had nothing to do for a while.

A thread that serves one group may call any other: it neither waits for the callbacks of a group nor queues behind them.
In a forked child the threads are gone and locks are as they were: every server starts anew there.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable

LINGER_S = 1.0  # of a thread that has nothing to do
_PATIENCE_S = 5.0  # for callbacks of the program at close()

_own = threading.local()
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def is_serving() -> bool:
    """Return True if this thread completes Futures or runs their callbacks."""
    return getattr(_own, "serves", False)


class Server:
    """Base of objects with a lock and threads of their own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._threads: set[threading.Thread] = set()
        _servers.add(self)

    def _start(self, serve: Callable[[], None]) -> None:
        """Start another thread. The caller has the lock."""

        def run() -> None:
            _own.serves = True
            try:
                serve()
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="zcomm-futures", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _join(self) -> None:
        """Join the threads. One in a callback of the program that does not return is left behind, with a warning."""
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        deadline = time.monotonic() + _PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in threads):
            warnings.warn(
                "a callback of a Future has not returned; its process group was closed without it", stacklevel=2
            )

    def _begin_anew(self) -> None:
        """Forget lock and threads, in a forked child."""
        self._changed = threading.Condition()
        self._threads = set()


def _begin_anew() -> None:
    for server in list(_servers):
        server._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
