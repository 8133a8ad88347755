"""Work: the result of a torch.distributed call, over the core's own handles.

``Flight`` holds the works of a group that have not ended. ``Done`` is the end of a blocking call. ``Pending`` waits for
the core and then finishes once: copies scratch back, completes its Future. A waiter or a thread of the group's
Completer, whichever is first, completes a Future. The first request for the Future of an operation in flight starts
that thread, because DDP's reducer waits only for Futures.
Thread rule: any thread may wait.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _TorchWork

from zcomm import _core
from zcomm.comm.tensors import PLAIN
from zcomm.comm.work import CoreWork
from zcomm.torch_backend.completer import Completer, Deferred, order_callbacks

_FOREVER = timedelta(0)  # torch's kNoTimeout
_KEPT = 4096  # works that only C++ may still hold
_KEPT_NBYTES = 4096  # of memory that the tensors of one of them hold


class Flight:
    """Works in flight, so that the program need not hold them: a Work may be dropped, and the operation continues.

    Some works copy results into the program's tensors when they are finished. Works that ended before another operation
    are finished before it. So a program that dropped them sees their results no later than that operation's.
    """

    def __init__(self) -> None:
        self._works: dict[Pending, None] = {}
        self._copying: dict[Pending, None] = {}
        self._limit = 16
        self.number = 0  # count of works so far

    @property
    def has_copies(self) -> bool:
        return bool(self._copying)

    def add(self, work: Pending, copies: bool = False) -> None:
        for oldest in list(self._works)[:1]:
            self._look_at(oldest)
        if len(self._works) >= self._limit:
            for other in list(self._works):
                self._look_at(other)
            self._limit = max(16, 2 * len(self._works))
        self._works[work] = None
        self.number += 1
        work.number = self.number
        if copies:
            self._copying[work] = None

    @staticmethod
    def _look_at(work: Pending) -> None:
        """Poll a work, because the program may have dropped it without a wait. The completer polls Futures."""
        if not work.has_future:
            work.poll()

    def finish_up_to(self, number: int, later_is_collective: bool = True) -> None:
        """Finish the copies of the works up to ``number`` that ended before an operation which has ended.

        Messages have no order with other operations, so of these it finishes all that have ended.
        """
        for work in list(self._copying):
            if work.number > number:
                return
            if later_is_collective and work.is_collective and work.has_begun():
                work.finish()  # at once: it has ended
            else:
                work.poll()

    def finish_collectives(self) -> None:
        """Wait for the collectives with copied results, and finish them: all ranks have called them."""
        for work in list(self._copying):
            if work.is_collective:
                work.finish()

    def discard(self, work: Pending) -> None:
        self._works.pop(work, None)
        self._copying.pop(work, None)

    def close(self) -> None:
        """Settle every work. The communicator has been closed: they end now."""
        for work in list(self._works):
            work.finish()


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
            work.finish(None if deadline is None else max(0.0, deadline - time.monotonic()))
            work.wait()

    def done(self) -> bool:
        return all(work.poll() for work in self._works)

    def has_begun(self) -> bool:
        return all(work.has_begun() for work in self._works)

    def start_now(self) -> None:
        for work in self._works:
            work.start_now()


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
        future.set_result(self.result())
        return future


_kept: deque[Ended | Pending] = deque(maxlen=_KEPT)


def _outlive(work: Ended | Pending) -> None:
    """Keep a work after its last Python reference was dropped. [Note: outliving]

    The C++ half of a work finds methods through its Python half, but does not hold it (DDP's join). Without the Python
    half ``wait()`` blocks forever and ``get_future()`` raises. Before torch 2.7 this holds for every work that is
    returned to C++ (torch's pull request 146376). So the latest ``_KEPT`` works are kept. Their small tensors are kept,
    too, because DDP reads a count that only the work holds; larger tensors are held weakly.
    """
    if getattr(work, "_is_kept", True):  # kept before, or its constructor has failed
        return
    work._is_kept = True
    if isinstance(work, Pending) and work._error is not None:
        work._error = _without_frames(work._error)
    if sum(map(_held_nbytes, work._outputs)) > _KEPT_NBYTES:
        work._weak_outputs = [weakref.ref(tensor) for tensor in work._outputs]
        work._outputs = []
    _kept.append(work)


def _without_frames(error: Exception) -> Exception:
    """Return a copy without traceback, because the traceback holds all local variables of the program's frames."""
    try:
        bare = copy(error)
    except Exception:  # the constructor of its class takes something else
        bare = RuntimeError(str(error))
    return bare.with_traceback(None)


def _result(work: Ended | Pending) -> list[torch.Tensor]:
    return work._outputs or [tensor for ref in work._weak_outputs if (tensor := ref()) is not None]


class Ended(Done):
    """A call that was done when it returned, for a caller that may hand its work to C++."""

    __slots__ = ("_is_kept", "_weak_outputs")

    def __init__(self, outputs: list[torch.Tensor]) -> None:
        super().__init__(outputs)
        self._weak_outputs: list[weakref.ref[torch.Tensor]] = []
        self._is_kept = False

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():
            _outlive(self)

    def result(self) -> list[torch.Tensor]:
        return _result(self)


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
        "_is_kept",
        "_keep",
        "_late_at",
        "_outputs",
        "_source",
        "_weak_outputs",
        "lane",
        "number",
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
        self._outputs = outputs
        self._weak_outputs: list[weakref.ref[torch.Tensor]] = []
        self._is_kept = False
        self.lane = lane
        self._flight = flight
        self._finish = finish
        self._keep = keep
        self._source = source
        self._error: Exception | None = None
        self._future: Any = None
        self.number = 0  # set by the Flight
        self._late_at: float | None = None
        self._give_up: Callable[[], Exception] | None = None
        self._complete_lock = threading.Lock()

    def limit(self, seconds: float, give_up: Callable[[], Exception]) -> None:
        """Set the work's own deadline: a thread that waits past it calls ``give_up`` for the operation's error."""
        self._late_at = time.monotonic() + seconds
        self._give_up = give_up

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Block until the operation ended.

        Raises: its error; TimeoutError if ``timeout`` passes first (then the operation continues).
        """
        if self._core is not None:
            self.finish(_seconds(timeout))
        if self._error is not None:
            raise self._error
        return True

    def finish(self, seconds: float | None = None, before_future: Callable[[], None] | None = None) -> None:
        """Wait and finish; the operation's own error is kept. Raises: TimeoutError after ``seconds``.

        ``before_future`` is called if this completes a Future, before that.
        """
        core = self._core
        if core is None:
            return
        left = None if self._late_at is None else max(0.0, self._late_at - time.monotonic())
        is_ours = left is not None and (seconds is None or left <= seconds)
        error = _outcome(core, left if is_ours else seconds)
        if isinstance(error, TimeoutError):
            if core.done():  # by its own timeout, or after the wait ended
                error = _outcome(core, None)
            elif is_ours and self._give_up is not None:
                error = self._give_up()
            else:
                raise error
        if self._flight.has_copies:
            self._flight.finish_up_to(self.number - 1, self.is_collective)
        self._complete(error, before_future)

    def poll(self) -> bool:
        """Return True if it ended; finishes it if so."""
        core = self._core
        if core is not None and core.done():
            self.finish()
        return self._core is None

    @property
    def is_collective(self) -> bool:
        """Return True if the work ends after all collectives that were called before it."""
        return self.lane.callbacks is not None

    def _complete(self, error: Exception | None, before_future: Callable[[], None] | None) -> None:
        with self._complete_lock:
            if self._core is None:
                return
            if error is None:
                try:
                    self._bring_back()
                except Exception as failed:
                    error = failed
            self._error = error
            self._core = self._finish = self._keep = self._give_up = None
            future = self._future
        self._flight.discard(self)
        if future is not None:
            if before_future is not None:
                before_future()
            self._fill(future)

    def _bring_back(self) -> None:
        """Copy results into the program's tensors, once the operation has ended."""
        if self._finish is not None:
            self._finish()

    def _fill(self, future: Any) -> None:
        future.set_result(self.result() if self._error is None else _Failure(self._error))

    def finish_in_background(self, seconds: float | None, before_future: Callable[[], None]) -> None:
        """Call finish() on a completer's thread."""
        self.finish(seconds, before_future)

    @property
    def has_future(self) -> bool:
        return self._future is not None

    def has_begun(self) -> bool:
        """Return True if the core has the operation. Callbacks may come before."""
        core = self._core
        return not isinstance(core, (Deferred, Together)) or core.has_begun()

    def start_now(self) -> None:
        """Start a deferred operation before this thread waits for its Future."""
        core = self._core
        if isinstance(core, (Deferred, Together)):
            core.start_now()

    def open_after_end(self, future: Any, gate: Any) -> None:
        """Complete ``gate`` once the operation and its ``future`` have ended, well or not."""
        self.finish()
        with suppress(Exception):  # its error is the callbacks' to see
            future.wait()  # another thread may have finished it, and be about to complete the Future
        gate.set_result(None)

    def new_future(self) -> Any:
        return torch.futures.Future()

    def get_future(self) -> Any:
        """Return a torch Future of the output tensors. An error reaches its waiters as RuntimeError with the text."""
        future = self.new_future()
        with self._complete_lock:
            is_pending = self._core is not None
            is_first = self._future is None
            if is_pending and is_first:
                self._future = future
            elif is_pending:
                future = self._future
        if not is_pending:
            self._fill(future)
            return future if self._error is None else future.then(_unwrapped)
        told = future.then(_unwrapped)
        if self.lane.callbacks is not None:
            order_callbacks(told, self, self.lane.callbacks)
        if is_first:
            self.lane.add(self)
        return told

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        return _result(self)

    def __del__(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_exiting():
            self._future = None
            _outlive(self)

    def source_rank(self) -> int:
        return -1 if self._source is None else self._source.rank

    _source_rank = source_rank


def _held_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage; for a tensor without plain memory, more than the limit."""
    is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided
    return tensor.untyped_storage().nbytes() if is_plain else _KEPT_NBYTES + 1


def _outcome(core: CoreWork, seconds: float | None) -> Exception | None:
    try:
        core.wait(seconds)
    except Exception as error:
        return error
    return None
