"""Work: what a torch.distributed call returns, over the core's own handles.

``Done`` is the end of a blocking call. ``Pending`` waits for the core and then finishes once: copies scratch back,
completes its Future. A Future is completed by whoever comes first: a waiter, or the group's completer thread, which is
started when the first Future of an operation in flight is asked for (DDP's reducer waits for nothing else).
Thread rule: any thread may wait.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Work as _TorchWork

from zcomm import _core

_FOREVER = timedelta(0)  # torch's kNoTimeout
_SLICE_S = 0.005
# Before torch 2.7 the C++ half of a work did not hold its Python half, and waited forever without it (torch's pull
# request 146376): then ended works are kept as long as anybody is likely to wait for them, though not their tensors.
_TORCH_FORGETS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 7)
_KEPT = 4096


class CoreWork(Protocol):
    def wait(self, timeout: float | None = None) -> None: ...
    def done(self) -> bool: ...


class Several:
    """The handles of a call that takes several operations of the core."""

    def __init__(self, works: list[CoreWork]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def done(self) -> bool:
        return all(work.done() for work in self._works)


class Together:
    """Works as one handle, for the end of coalescing."""

    def __init__(self, works: list[Pending]) -> None:
        self._works = works

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for work in self._works:
            work.settle(None if deadline is None else max(0.0, deadline - time.monotonic()))
            work.wait()

    def done(self) -> bool:
        return all(work.poll() for work in self._works)


class _Weak:
    """Tensors as long as somebody else has them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]

    def alive(self) -> list[torch.Tensor]:
        return [tensor for ref in self._tensors if (tensor := ref()) is not None]


class _Failure:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _unwrapped(future: Any) -> Any:
    value = future.value()
    if isinstance(value, _Failure):
        raise value.error
    return value


def _seconds(timeout: timedelta | None) -> float | None:
    return None if timeout is None or timeout <= _FOREVER else timeout.total_seconds()


class Done(_TorchWork):
    """A call that was done when it returned."""

    __slots__ = ("_outputs",)

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Pending(_TorchWork):
    """An operation in flight. Its tensors are kept until it is done."""

    __slots__ = (
        "_complete_lock",
        "_core",
        "_error",
        "_finish",
        "_flight",
        "_future",
        "_give_up",
        "_keep",
        "_lane",
        "_late_at",
        "_outputs",
        "_source",
    )

    def __init__(
        self,
        core: CoreWork,
        outputs: list[torch.Tensor],
        lane: Completer,
        flight: Flight,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        source: _core.Source | None = None,
    ) -> None:
        super().__init__()
        self._core: CoreWork | None = core
        self._outputs: list[torch.Tensor] | _Weak = outputs
        self._lane = lane
        self._flight = flight
        self._finish = finish
        self._keep = keep
        self._source = source
        self._error: Exception | None = None
        self._future: Any = None
        self._late_at: float | None = None
        self._give_up: Callable[[], Exception] | None = None
        self._complete_lock = threading.Lock()

    def limit(self, seconds: float, give_up: Callable[[], Exception]) -> None:
        """A deadline of its own: who waits past it calls ``give_up``, whose result becomes the operation's error."""
        self._late_at = time.monotonic() + seconds
        self._give_up = give_up

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Block until the operation ended.

        Raises: its error; TimeoutError when ``timeout`` passes first (then the operation goes on).
        """
        if self._core is not None:
            self.settle(_seconds(timeout))
        if self._error is not None:
            raise self._error
        return True

    def settle(self, seconds: float | None = None) -> None:
        """Wait and finish; the operation's own error is kept. Raises: TimeoutError after ``seconds``."""
        core = self._core
        if core is None:
            return
        left = None if self._late_at is None else max(0.0, self._late_at - time.monotonic())
        is_ours = left is not None and (seconds is None or left <= seconds)
        error = _outcome(core, left if is_ours else seconds)
        if isinstance(error, TimeoutError):
            if core.done():  # with a deadline of its own, or since we stopped waiting
                error = _outcome(core, None)
            elif is_ours and self._give_up is not None:
                error = self._give_up()
            else:
                raise error
        self._complete(error)

    def poll(self) -> bool:
        """Whether it ended; finishes it if so."""
        core = self._core
        if core is not None and core.done():
            self.settle()
        return self._core is None

    def _complete(self, error: Exception | None) -> None:
        with self._complete_lock:
            if self._core is None:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failed:
                    error = failed
            self._error = error
            self._core = self._finish = self._keep = self._give_up = None
            future = self._future
        if future is not None:
            future.set_result(self.result() if error is None else _Failure(error))
        self._flight.discard(self)

    def settle_in_background(self, seconds: float | None = None) -> None:
        """settle(), on the completer's thread."""
        self.settle(seconds)

    def _new_future(self) -> Any:
        return torch.futures.Future()

    def get_future(self) -> Any:
        """A torch Future of the output tensors. An error reaches its waiters as RuntimeError with the text."""
        future = self._new_future()
        with self._complete_lock:
            pending = self._core is not None
            if pending and self._future is not None:
                return self._future.then(_unwrapped)
            if pending:
                self._future = future
        if pending:
            self._lane.add(self)
        elif self._error is None:
            future.set_result(self.result())
            return future
        else:
            future.set_result(_Failure(self._error))
        return future.then(_unwrapped)

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        if isinstance(self._outputs, _Weak):
            return self._outputs.alive()
        return self._outputs

    def let_go(self) -> None:
        """Keep the tensors no longer than others do."""
        self._outputs = _Weak(self.result())
        self._future = None

    def source_rank(self) -> int:
        return -1 if self._source is None else self._source.rank

    _source_rank = source_rank


class Completer:
    """One thread, started at first need, that finishes works whose Futures somebody waits for.

    Collectives end in call order: it waits for the oldest. Messages do not: with ``any_order`` it goes round.
    """

    def __init__(self, any_order: bool) -> None:
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._any_order = any_order
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, work: Pending) -> None:
        with self._lock:
            if self._thread is None:
                run = _go_round if self._any_order else _in_order
                self._thread = threading.Thread(target=run, args=(self._queue,), name="zcomm-futures", daemon=True)
                self._thread.start()
        self._queue.put(work)

    def close(self) -> None:
        """The works in it must be about to end: their communicator has been closed."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def __del__(self) -> None:
        if self._thread is not None:  # its group was dropped, not destroyed
            self._queue.put(None)


def _in_order(queue: SimpleQueue[Pending | None]) -> None:
    while (work := queue.get()) is not None:
        work.settle_in_background()
        del work  # while the thread waits for the next one, this one's tensors can go


def _go_round(queue: SimpleQueue[Pending | None]) -> None:
    works: list[Pending] = []
    is_open = True
    while is_open or works:
        while is_open and (not works or not queue.empty()):
            work = queue.get()
            if work is None:
                is_open = False
                break
            works.append(work)
        for work in works:
            try:
                work.settle_in_background(_SLICE_S)
            except TimeoutError:
                continue
        works = [work for work in works if not work.poll()]


def _outcome(core: CoreWork, seconds: float | None) -> Exception | None:
    try:
        core.wait(seconds)
    except Exception as error:
        return error
    return None


class Flight:
    """Works in flight, so that nobody need hold them: torch lets a program drop a Work, and the operation goes on."""

    def __init__(self) -> None:
        self._works: dict[Pending, None] = {}
        self._limit = 16
        self._ended: deque[Pending] | None = deque(maxlen=_KEPT) if _TORCH_FORGETS else None

    def add(self, work: Pending) -> None:
        for oldest in list(self._works)[:1]:
            oldest.poll()  # one that was dropped, and so is not waited for by anybody
        if len(self._works) >= self._limit:
            for other in list(self._works):
                other.poll()
            self._limit = max(16, 2 * len(self._works))
        self._works[work] = None

    def discard(self, work: Pending) -> None:
        self._works.pop(work, None)
        if self._ended is not None:
            work.let_go()
            self._ended.append(work)

    def close(self) -> None:
        """After the communicator was closed: every work ends now."""
        for work in list(self._works):
            work.settle()
