"""Threads that complete the Futures of a process group, and that run the program's callbacks on them in one order.

[Note: callbacks] torch runs a callback on the thread that completes the Future. A callback that waits for another
Future would block that thread. Collectives in callbacks (PowerSGD calls two all_reduce) would interleave with the
program's own collectives in another order on each rank. So callbacks run one at a time, in the order of registration.
Later collectives of the program come after them: a blocking call waits, an asynchronous one is Deferred. The order
equals a program that waits for each Future before it continues, as with torch's NCCL backend.
Calls and registrations inside a callback take effect at once. If a callback waits for a Future that later callbacks
complete, these run first, on its own thread (``start_up_to``).

[Note: torch's Future] ``install`` replaces ``then``, ``add_done_callback`` and ``wait`` of torch's class, and
``collect_all``, for the whole process. For Futures of zcomm's groups they keep the order; others behave as before.
Nothing narrower reaches these Futures. Only a Future created by torch's ``then`` can carry an error into C++ (DDP's
reducer), and torch creates it in its own class. Such an object accepts no attributes, and Python refuses to assign a
subclass to its ``__class__``. A Future of another class could not set an error that C++ sees. Without the replaced
``then`` a group would not know that callbacks come before the next collective. Without ``wait`` and ``collect_all`` a
callback would wait for callbacks that only its own thread may run, and signal handlers would not run.

A forked child has no such threads, and locks in an unknown state, so every server starts again.
Thread rule: any thread. A thread that serves one group may call any other: it neither waits for the callbacks of a
group nor queues behind them.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zcomm import _core
from zcomm.comm.work import CoreWork

if TYPE_CHECKING:
    from zcomm.torch_backend.work import Pending

_LINGER_S = 1.0  # of a thread that has nothing to do
_PATIENCE_S = 5.0  # for callbacks of the program at close()
_SLICE_S = 0.005
_LOOK_S = 0.1  # between looks at the deadline

_own = threading.local()
_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def is_serving() -> bool:
    """Return True if this thread completes Futures or runs their callbacks."""
    return getattr(_own, "serves", False)


class Server:
    """Base of objects with their own lock and threads."""

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
        """Join the threads. A thread in a callback that does not return is abandoned, with a warning."""
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
        """Replace lock and threads in a forked child."""
        self._changed = threading.Condition()
        self._threads = set()


def _begin_anew() -> None:
    for server in list(_servers):
        server._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


# --- callbacks --------------------------------------------------------------------------------------------------------


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
        """Run the callbacks up to this one, if this thread runs callbacks, because one of them waits for it."""
        self._callbacks.start_up_to(self)

    def check_deadline(self) -> None:
        """Raise TimeoutError, and fail the group, if its turn is late or its callback has not returned in time."""
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
    """The callbacks of one group, and the operations that wait for them. ``pending``: the number of unfinished entries.

    deadline_s: for a callback to begin, and to return. expire: returns the error of a late one.
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
            self._changed.wait_for(lambda: self._queue or not self._is_open, _LINGER_S)
            if self._queue:
                return self._queue.popleft()
            self._threads.discard(threading.current_thread())  # under this lock: an entry to come starts another
            return None

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._queue.clear()
        self.pending = 0


# --- completion -------------------------------------------------------------------------------------------------------


class Completer(Server):
    """Threads that finish works with requested Futures, so that no other thread must.

    Collectives end in call order, so it waits for the oldest started one. Messages do not: with ``any_order`` it polls
    all in turn.
    One thread leads: it waits for works. It hands over the lead before it completes a Future, because that runs
    callbacks of messages, which may wait for other Futures.
    Invariant: while works are in the queue some thread leads, or is about to.
    callbacks: runs the callbacks of the works' Futures; None: the completing thread runs them.
    """

    def __init__(self, any_order: bool, callbacks: Callbacks | None = None) -> None:
        super().__init__()
        self.callbacks = callbacks
        self._any_order = any_order
        self._works: dict[Pending, None] = {}
        self._leader: threading.Thread | None = None
        self._idle = 0
        self._is_open = True
        if callbacks is not None:
            callbacks.on_begun = self._look_again

    def add(self, work: Pending) -> None:
        with self._changed:
            self._works[work] = None
            if self._leader is None:
                self._wake()

    def close(self) -> None:
        """Join the threads. The works must be about to end: their communicator has been closed."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._join()

    def _look_again(self) -> None:
        """Wake a thread: a work that had been deferred has been started."""
        with self._changed:
            if self._works and self._leader is None:
                self._wake()

    def _wake(self) -> None:
        if self._idle > 0:
            self._changed.notify()
        else:
            self._start(self._serve)

    def _serve(self) -> None:
        while works := self._lead():
            for work in works:
                if not self._finish(work):
                    break
            else:
                with self._changed:
                    self._leader = None
            del work, works  # while the thread waits for the next one, this one's tensors can go

    def _lead(self) -> list[Pending]:
        """Return the works that this thread, as the leader, waits for next; none: the thread may end."""
        with self._changed:
            while True:
                if self._leader is None:
                    begun = [work for work in self._works if work.has_begun()]
                    if begun:
                        self._leader = threading.current_thread()
                        return begun if self._any_order else begun[:1]
                if not self._is_open and not self._works:
                    return []
                self._idle += 1
                was_woken = self._changed.wait(_LINGER_S)
                self._idle -= 1
                if not was_woken and (self._leader is not None or not self._works):
                    return []

    def _finish(self, work: Pending) -> bool:
        """Wait for ``work``; return False if another thread leads now."""
        leads = True

        def hand_over() -> None:
            nonlocal leads
            leads = False
            with self._changed:
                self._works.pop(work, None)
                self._leader = None
                if self._works:
                    self._wake()

        try:
            work.finish_in_background(_SLICE_S if self._any_order else None, hand_over)
        except TimeoutError:
            return True  # a message that has not arrived: poll the next one
        if leads:  # another thread has finished it
            with self._changed:
                self._works.pop(work, None)
        return leads

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._works.clear()
        self._leader, self._idle = None, 0


# --- torch's class ----------------------------------------------------------------------------------------------------


_Future: Any = torch._C.Future
_then, _add_done_callback, _wait = _Future.then, _Future.add_done_callback, _Future.wait
_collect_all: Any = torch._C._collect_all
_ours: weakref.WeakKeyDictionary[Any, tuple[Pending, Callbacks]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()  # by Future that ``then`` returned
_members: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # by Future that collect_all returned


def order_callbacks(future: Any, work: Pending, callbacks: Callbacks) -> None:
    """Let ``callbacks`` run those that the program registers on ``future``, which ends with ``work``."""
    _ours[future] = (work, callbacks)


def _register(register: Callable[[Any, Any], Any], future: Any, callback: Callable[[Any], Any]) -> Any:
    ours = _ours.get(future)
    if ours is None or future.done():
        turn = _turns.get(future)
        return _keep_turn(register(future, callback), turn)
    work, callbacks = ours
    if is_serving():  # a callback inside a callback runs at once, which keeps its order
        work.finish()
        _end_of(future)
        return register(future, callback)
    gate = work.new_future()
    result = register(gate, lambda _: callback(future))
    return _keep_turn(result, callbacks.run_after(work, future, gate))


def _keep_turn(result: Any, turn: Call | None) -> Any:
    if result is not None and turn is not None:
        _turns[result] = turn
    return result


def then(self: Any, callback: Callable[[Any], Any]) -> Any:
    return _register(_then, self, callback)


def add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
    _register(_add_done_callback, self, callback)


def wait(self: Any) -> Any:
    """Return the value. Waits in short intervals, so that signal handlers run."""
    if self.done() or not _is_known(self):
        return _wait(self)
    _let_come(self)
    gate = threading.Lock()
    gate.acquire()
    _add_done_callback(self, lambda _: gate.release())
    while not gate.acquire(timeout=_LOOK_S):
        if (turn := _turns.get(self)) is not None:
            turn.check_deadline()
    return _wait(self)


def collect_all(futures: Sequence[Any]) -> Any:
    result = _collect_all(futures)
    if members := [future for future in futures if _is_known(future)]:
        _members[result] = members
    return result


def _is_known(future: Any) -> bool:
    return future in _ours or future in _turns or future in _members


def _let_come(future: Any) -> None:
    """Start or run entries that this thread will wait for, though they come after its own callback in the order."""
    if (ours := _ours.get(future)) is not None:
        ours[0].start_now()
    if (turn := _turns.get(future)) is not None:
        turn.come()
    for member in _members.get(future, ()):
        _let_come(member)


def _end_of(future: Any) -> None:
    """Wait for the Future of a work that has ended: the thread that finished it may still have to complete it."""
    try:
        _wait(future)
    except Exception:
        return  # its callbacks see it


def install() -> None:
    """Replace the methods of torch's class, once per process."""
    for method, original in ((then, _then), (add_done_callback, _add_done_callback), (wait, _wait)):
        method.__doc__ = original.__doc__
        setattr(_Future, method.__name__, method)
    torch._C._collect_all = collect_all
