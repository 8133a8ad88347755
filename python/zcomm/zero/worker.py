"""Worker: one thread that runs calls in order. Ctrl-C, while a thread waits for one, is that exception and no other.

``Future.result`` waits on a Condition with a lock that is a Python object. An interrupt at its return leaves the lock
in a wrong state, and another error (RuntimeError: cannot release un-acquired lock) hides the interrupt.
The thread is a daemon: Python joins other threads before ``atexit`` closes the parts that this one may wait for.
Invariant: a moment is a flag, which is set before its gate opens. An interrupt may take an opening and lose it, so a
waiting thread looks at the flag again.
Thread rule: ``submit`` by one thread at a time; a moment may be waited for by any.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from zcomm import _core

T = TypeVar("T")
_HERE = threading.local()
_LOOK_S = 0.05  # until another look at the flag, after an opening that was lost


class StallTimer:
    """Seconds that threads which train have waited for a drive. ``wait`` times a call that waits.

    Waits of a Worker are not added: either they are hidden, or a thread that trains waits for the Worker's call.
    """

    seconds = 0.0

    def wait(self, work: Waitable) -> None:
        """Wait for ``work``. Raises: its error."""
        start = time.perf_counter()
        try:
            work.wait()
        finally:
            if not is_worker():
                self.seconds += time.perf_counter() - start


class Waitable(Protocol):
    """Something that ends by itself."""

    def wait(self) -> None: ...


class Pollable(Waitable, Protocol):
    """A Waitable that shows whether it has ended."""

    def done(self) -> bool: ...


def is_worker() -> bool:
    """Return True on the thread of a Worker."""
    return getattr(_HERE, "is_worker", False)


_Todo = list[tuple["Call[Any]", Callable[..., Any], tuple[Any, ...]]]


class Moment:
    """A point that one thread reaches once, and that others wait for."""

    def __init__(self, load: _core.WorkerLoad) -> None:
        self._pid = os.getpid()
        self._load = load
        self._gate = threading.Lock()
        self._gate.acquire()
        self._reached = False

    def done(self) -> bool:
        """Return True once it is reached; never wait."""
        return self._reached

    def reach(self) -> None:
        """Let the waiting threads go on."""
        self._reached = True
        self._gate.release()

    def wait(self) -> None:
        """Wait until it is reached. Raises: RuntimeError in a forked child, which has no such thread."""
        if not self._reached:
            _require_own(self._pid)
        if self._reached or (self._gate.acquire(timeout=_LOOK_S) and self._reached):
            return
        self._load.begin_wait()
        try:
            while not self._reached:
                self._gate.acquire(timeout=_LOOK_S)
        finally:
            self._load.end_wait()


class Call(Moment, Generic[T]):
    """A call that a Worker runs, or has run: its end is the moment, also with an error."""

    def __init__(self, load: _core.WorkerLoad) -> None:
        super().__init__(load)
        self.value: Any = None
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise its error, if it has ended with one; never wait."""
        if self.done() and self.error is not None:
            raise self.error

    def result(self) -> T:
        """Wait, and return its value. Raises: its error, each time."""
        self.wait()
        try:
            if self.error is not None:
                raise self.error
            return self.value  # type: ignore[no-any-return]
        finally:
            del self  # as in _run


def _require_own(pid: int) -> None:
    if os.getpid() != pid:
        raise RuntimeError("this process was forked from the one that owns this optimizer; only the parent can use it")


def _run(todo: _Todo, load: _core.WorkerLoad) -> None:
    """Run the call in ``todo``. Afterwards neither it nor this frame, which an error has, refers to the call that has
    the error: such a cycle would keep everything alive."""
    call, function, arguments = todo.pop()
    try:
        call.value = function(*arguments)
    except BaseException as error:
        call.error = error
    load.done()
    call.reach()
    del call, function, arguments


class Worker:
    """A thread named ``name``, started by the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._calls: SimpleQueue[_Todo | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._load = _core.WorkerLoad()
        self._is_closed = False

    def submit(self, function: Callable[..., T], *arguments: Any) -> Call[T]:
        """Run ``function(*arguments)`` after all calls before it. Raises: RuntimeError in a forked child."""
        _require_own(self._pid)
        if self._is_closed:
            raise RuntimeError(f"the thread {self._name} has ended")
        call: Call[T] = Call(self._load)
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._calls, self._load), name=self._name, daemon=True)
            self._thread.start()
        self._load.add()
        self._calls.put([(call, function, arguments)])
        return call

    def moment(self) -> Moment:
        """Return a moment that a call on this thread will reach."""
        return Moment(self._load)

    def close(self) -> None:
        """End the thread, after the calls that it has been given. No effect in a forked child."""
        self._is_closed = True
        if self._thread is not None and os.getpid() == self._pid:
            self._calls.put(None)
            if self._thread.is_alive():  # False if an interrupt preceded its start
                self._thread.join()


def _serve(calls: SimpleQueue[_Todo | None], load: _core.WorkerLoad) -> None:
    _HERE.is_worker = True
    load.serve()
    while (todo := calls.get()) is not None:
        _run(todo, load)
