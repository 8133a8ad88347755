"""Delays at points of possible waiting: at hooks, at waits, and between the start of an operation and its work.

``Late`` replaces a core communicator. Its thread runs every operation, in order, after a random sleep. So an
asynchronous one reads and writes its memory as late as it may. ``LateSwap`` does the same for a swap file; its
operations may overtake one another. ``sleepy`` adds sleeps around methods. Each rank has its own random numbers.
"""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

COLLECTIVES = {*"all_reduce reduce reduce_scatter all_gather broadcast gather scatter all_to_all barrier".split()}


class Clock:
    """Sleeps of random length: mostly none, some of a hundred microseconds, few of milliseconds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self.slept = 0

    def sleep(self) -> None:
        with self._lock:
            number = self._random.random()
            self.slept += number >= 0.9
        if number >= 0.996:
            time.sleep(0.002)
        elif number >= 0.9:
            time.sleep(0.001 * (number - 0.9))


class LateWork:
    """A Work like the core's: ``wait`` rethrows, dropping it waits."""

    def __init__(self, future: Future[None], clock: Clock) -> None:
        self._future, self._clock = future, clock

    def wait(self, timeout: float | None = None) -> None:
        self._future.result(timeout)
        self._clock.sleep()

    def done(self) -> bool:
        return self._future.done()

    def __del__(self) -> None:
        self._future.exception()


class _Stand:
    """Forwards all other attributes to ``inner``."""

    def __init__(self, inner: Any, clock: Clock, threads: int) -> None:
        self._inner, self._clock = inner, clock
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="late")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _later(self, call: Callable[[], None]) -> LateWork:
        def run() -> None:
            self._clock.sleep()
            call()

        return LateWork(self._pool.submit(run), self._clock)

    def close(self) -> None:
        self._pool.shutdown()
        self._inner.close()


class Late(_Stand):
    """A communicator's stream that lags behind."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        super().__init__(inner, clock, 1)

    def all_reduce_tensor(self, *_args: Any) -> Any:
        """Return NotImplemented, so that the caller uses ``all_reduce``, which is late."""
        return NotImplemented

    def after(self, awaited: Any, async_op: bool = True) -> Any:
        """Wait on this stand-in's thread for an operation of another one; an event is the core's."""
        return self._later(awaited.wait) if isinstance(awaited, LateWork) else self._inner.after(awaited, async_op)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in COLLECTIVES:
            return value

        def call(*args: Any, **options: Any) -> LateWork | None:
            *others, later = args  # the last positional argument of each: whether it is asynchronous
            work = self._later(lambda: value(*others, False, **options))
            if later:
                return work
            work.wait()
            return None

        return call


class LateSwap(_Stand):
    """A slow drive that may reorder operations, except on one key."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        super().__init__(inner, clock, 4)
        self._last: dict[str, Future[None]] = {}

    def read(self, key: str, *args: Any) -> LateWork:
        return self._operate(self._inner.read, key, *args)

    def write(self, key: str, *args: Any) -> LateWork:
        return self._operate(self._inner.write, key, *args)

    def _operate(self, operation: Callable[..., Any], key: str, *args: Any) -> LateWork:
        before = self._last.get(key)

        def run() -> None:
            if before is not None:
                before.exception()  # submitted earlier, so it is running or complete
            operation(key, *args).wait()

        work = self._later(run)
        self._last[key] = work._future
        return work


def sleepy(owner: type, names: list[str], clock: Clock) -> None:
    """Let these methods sleep before and after, from now on."""
    for name in names:
        original = getattr(owner, name)

        @functools.wraps(original)
        def late(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            clock.sleep()
            try:
                return _original(*args, **kwargs)
            finally:
                clock.sleep()

        setattr(owner, name, late)
