"""Callbacks of the Futures of a group's collectives: on a thread of their own, in the order of their registration.

torch runs a callback on the thread that completes the Future. One that waits for another Future would hold that one up.
What it calls (PowerSGD calls two all_reduce in callbacks) would come between the program's own collectives in another
order on each rank. So callbacks run one at a time, in the order in which the program registered them. What the program
calls after that comes after them: a blocking call waits, an asynchronous one is Deferred. The order is that of a
program that waits for each Future before it goes on, which is what torch's NCCL backend does.
A callback calls, and registers other callbacks, at once. One that waits for a Future that later callbacks complete has
these run first, on its own thread (``start_up_to``).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zcomm import _core
from zcomm.comm.work import CoreWork
from zcomm.torch_backend.futures.threads import LINGER_S, Server, is_serving

if TYPE_CHECKING:
    from zcomm.torch_backend.futures.work import Pending


class Call:
    """Callbacks that have been registered on ``gate``, which is opened once ``work`` has ended.

    The Futures that they complete keep it: their place in the order of the group's callbacks.
    """

    def __init__(self, callbacks: Callbacks, work: Pending, future: Any, gate: Any, deadline_s: float) -> None:
        self._callbacks = callbacks
        self._work, self._future, self._gate = work, future, gate
        self._deadline_s = deadline_s
        self._late_at = time.monotonic() + deadline_s

    def run(self) -> None:
        self._work.finish()
        self._late_at = time.monotonic() + self._deadline_s
        self._work.open_after_end(self._future, self._gate)

    def come(self) -> None:
        """Run the callbacks up to this one, if this thread runs callbacks: one of them waits for it."""
        self._callbacks.start_up_to(self)

    def check_deadline(self) -> None:
        """Raise TimeoutError, and give up the group, if it has not come in time, or its callback has not returned."""
        if time.monotonic() > self._late_at:
            raise self._callbacks.expire()


class Deferred:
    """A core Work that is started after the callbacks before it."""

    def __init__(
        self, callbacks: Callbacks, start: Callable[[], CoreWork], deadline_s: float, expire: Callable[[], Exception]
    ) -> None:
        self._callbacks = callbacks
        self._start: Callable[[], CoreWork] | None = start
        self._late_at, self._expire = time.monotonic() + deadline_s, expire
        self._pid = os.getpid()
        self._claim = threading.Lock()
        self._has_begun = threading.Event()
        self._work: CoreWork | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            assert self._start is not None
            self._work = self._start()
        except Exception as error:
            self._error = error
        self._begin()

    def cancel(self, error: Exception) -> None:
        if self._claim.acquire(blocking=False):
            self._error = error
            self._begin()

    def _begin(self) -> None:
        self._start = None
        self._has_begun.set()
        self._callbacks.on_begun()

    def has_begun(self) -> bool:
        """Return True if the operation has been started or has failed. One that is past the deadline fails now."""
        if not self._has_begun.is_set() and time.monotonic() > self._late_at:
            self.cancel(self._expire())
        return self._has_begun.is_set()

    def start_now(self) -> None:
        """Start the operation if this thread runs the callbacks before it: one of them waits for it."""
        if not self._has_begun.is_set():
            self._callbacks.start_up_to(self)

    def wait(self, timeout: float | None = None) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "Work: the operation was called before this process was forked; only the parent can wait for it"
            )
        self.start_now()
        began_waiting = time.monotonic()
        left = max(0.0, self._late_at - began_waiting)
        self._has_begun.wait(left if timeout is None else min(left, timeout))
        if not self.has_begun() and timeout is not None:
            raise TimeoutError(f"Work.wait: not begun after {timeout:g} s: earlier callbacks have not returned")
        self._has_begun.wait()
        if self._error is not None:
            raise self._error
        assert self._work is not None
        self._work.wait(None if timeout is None else max(0.0, timeout - (time.monotonic() - began_waiting)))

    def done(self) -> bool:
        return self._has_begun.is_set() and (self._work is None or self._work.done())


class Callbacks(Server):
    """The callbacks of one group, and what waits for them. ``pending``: how many entries have not been done.

    deadline_s: of a callback's turn to come, and of its return. expire: makes the error of one that is late.
    """

    def __init__(self, deadline_s: float, expire: Callable[[], Exception]) -> None:
        super().__init__()
        self.expire = expire
        self.pending = 0
        self._deadline_s = deadline_s
        self.on_begun: Callable[[], None] = lambda: None  # called when a Deferred has been started
        self._queue: deque[Call | Deferred] = deque()
        self._load = _core.WorkerLoad()
        self._is_open = True

    def hold_back(self) -> bool:
        """Return True if a collective that this thread calls comes after callbacks that have not returned."""
        return self.pending > 0 and not is_serving()

    def run_after(self, work: Pending, future: Any, gate: Any) -> Call:
        """Open ``gate`` when ``work`` has ended, and with it ``future``."""
        call = Call(self, work, future, gate, self._deadline_s)
        self._add(call)
        return call

    def defer(self, start: Callable[[], CoreWork], deadline_s: float, expire: Callable[[], Exception]) -> Deferred:
        """Call ``start`` after the callbacks registered so far, ``expire`` if they take longer than ``deadline_s``."""
        deferred = Deferred(self, start, deadline_s, expire)
        self._add(deferred)
        return deferred

    def drain(self, seconds: float) -> bool:
        """Wait until all have returned; False after ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.pending == 0, seconds)

    def start_up_to(self, last: Call | Deferred) -> None:
        """Start the operations up to ``last``, if this thread runs callbacks; run callbacks, too, if ``last`` is one.

        One entry at a time: a callback may wait for the next one.
        """
        while (entry := self._take_up_to(last)) is not None:
            entry.run()
            self._done(1)

    def _take_up_to(self, last: Call | Deferred) -> Call | Deferred | None:
        with self._changed:
            if threading.current_thread() not in self._threads or last not in self._queue:
                return None
            entry = next(e for e in self._queue if isinstance(last, Call) or isinstance(e, Deferred))
            self._queue.remove(entry)
            return entry

    def close(self) -> None:
        """Join the threads. The callbacks' works must be about to end: their communicator has been closed."""
        with self._changed:
            self._is_open = False
            dropped = [entry for entry in self._queue if isinstance(entry, Deferred)]
            for entry in dropped:
                self._queue.remove(entry)
            self._changed.notify_all()
        for entry in dropped:
            entry.cancel(RuntimeError("the process group was closed before the operation had begun"))
        self._done(len(dropped))
        self._join()

    def _add(self, entry: Call | Deferred) -> None:
        with self._changed:
            self._queue.append(entry)
            self.pending += 1
            self._load.add()
            if self._threads:
                self._changed.notify_all()
            else:
                self._start(self._serve)

    def _done(self, count: int) -> None:
        with self._changed:
            self.pending -= count
            for _ in range(count):
                self._load.done()
            self._changed.notify_all()

    def _serve(self) -> None:
        while (entry := self._next()) is not None:
            entry.run()
            self._done(1)
            del entry

    def _next(self) -> Call | Deferred | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or not self._is_open, LINGER_S)
            if self._queue:
                return self._queue.popleft()
            self._threads.discard(threading.current_thread())  # under this lock: an entry to come starts another
            return None

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._queue.clear()
        self.pending = 0
