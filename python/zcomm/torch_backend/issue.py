"""Start and end of every operation of a process group.

A blocking call runs on the calling thread (the core's fast path). An asynchronous call, and a call with a timeout of
its own, runs on the communicator's thread. A call that has passed its own timeout has failed on this rank. The group is
closed, as after any failure, so that the other ranks do not wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from zcomm import _core
from zcomm.comm.tensors import count_written, stands_for_weight
from zcomm.comm.work import CoreWork
from zcomm.torch_backend.completer import Callbacks, Completer
from zcomm.torch_backend.options import is_async, timeout_of
from zcomm.torch_backend.staging import Staging
from zcomm.torch_backend.work import Done, Flight, Pending, Several

Core = _core.Communicator
Start = Callable[[bool], "_core.Work | None"]  # takes async_op


class Issue:
    """The core communicator of a process group, and its works."""

    _core: Core
    _rank: int
    _size: int

    def _open(self, core: Core, timeout_s: float) -> None:
        self._core = core
        self._rank = core.rank
        self._size = core.world_size
        self._timeout_s = timeout_s  # of calls without a timeout
        self._deadline_s = timeout_s  # of the core
        self._has_core_deadline = True  # while no other timeout has been set, and none has passed
        self._given_up: Exception | None = None
        self._flight = Flight()
        itself = weakref.ref(self)
        self._callbacks = Callbacks(timeout_s, lambda: _stuck_in(itself()))
        self._collectives = Completer(any_order=False, callbacks=self._callbacks)
        self._messages = Completer(any_order=True)
        self._coalesced: list[Pending] | None = None
        self._sequence = 0

    def _close(self) -> None:
        self._core.close()
        self._callbacks.close()
        self._flight.close()
        self._collectives.close()
        self._messages.close()

    def _issue(
        self,
        what: str,
        opts: Any,
        outputs: Sequence[torch.Tensor],
        starts: Sequence[Start],
        staging: Staging | None = None,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        written: Sequence[torch.Tensor] | None = None,
    ) -> Done | Pending:
        """Run ``starts``, one operation of the core each, then ``finish``, then the copies of ``staging``.

        written: on this rank; None: all ``outputs``.
        """
        if self._given_up is not None:
            raise RuntimeError(f"{what}: the group is closed, because before this {self._given_up}")
        self._sequence += 1
        if staging is not None and staging.is_used:
            finish = _one_after_another(finish, staging.finish)
        written = list(outputs) if written is None else list(written)
        if any(stands_for_weight(tensor) for tensor in written):
            finish = _one_after_another(finish, lambda: count_written(written))
        timeout = timeout_of(opts)
        if timeout is None and self._timeout_s != self._deadline_s:
            timeout = self._timeout_s
        asynchronous = is_async(opts)
        is_held_back, number = self._callbacks.hold_back(), self._flight.number
        if is_held_back and not asynchronous and not self._callbacks.drain(self._deadline_s):
            raise self._stuck(what)
        if not asynchronous and timeout is None:
            try:
                for start in starts:
                    start(False)
            except TimeoutError as error:
                raise self._explained(error) from None
            if self._flight.has_copies:
                self._flight.finish_up_to(number)
            if finish is not None:
                finish()
            increment_version(written)
            return Done(list(outputs))
        core_work = self._deferred(what, starts) if asynchronous and is_held_back else self._started(starts)
        work = self._work_for(outputs)(core_work, list(outputs), self._collectives, self._flight, finish, keep)
        if timeout is not None:
            work.limit(timeout, lambda: self._give_up(what, timeout))
        self._flight.add(work, copies=finish is not None)
        increment_version(written)
        if not asynchronous:
            work.wait()
        elif self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _work_for(self, tensors: Sequence[torch.Tensor]) -> Callable[..., Pending]:
        """Return the constructor of the work of an operation on ``tensors``."""
        return Pending

    def _is_simple(self, opts: Any) -> bool:
        """Return True for a blocking call with the core's timeout, with nothing to be done before or after it."""
        if self._callbacks.pending or self._flight.has_copies or not self._has_core_deadline:
            return False
        return not is_async(opts) and timeout_of(opts) is None

    def _explained(self, error: TimeoutError) -> TimeoutError:
        return TimeoutError(f"{error} (the timeout of this process group is {self._timeout_s:g} s)")

    def _started(self, starts: Sequence[Start]) -> CoreWork:
        works = [start(True) for start in starts]
        return works[0] if len(works) == 1 else Several(works)  # type: ignore[return-value, arg-type]

    def _deferred(self, what: str, starts: Sequence[Start]) -> CoreWork:
        """Start the operation after the callbacks that the program has registered so far."""
        prepare, site = self._start_elsewhere(), _core.call_site()

        def start() -> CoreWork:
            prepare()
            _core.set_call_site(site)
            try:
                return self._started(starts)
            finally:
                _core.set_call_site("")

        return self._callbacks.defer(start, self._deadline_s, lambda: self._stuck(what))

    def _start_elsewhere(self) -> Callable[[], None]:
        """Return a function that another thread calls before it starts an operation of this thread."""
        return lambda: None

    def _give_up(self, what: str, timeout: float, reason: str = "it to end") -> Exception:
        self._has_core_deadline = False
        self._given_up = TimeoutError(f"{what}: rank {self._rank} of {self._size} waited {timeout:g} s for {reason}")
        self._core.close()
        return self._given_up

    def _stuck(self, what: str) -> Exception:
        return self._give_up(what, self._deadline_s, "the callbacks of earlier Futures of this group to return")


def _stuck_in(group: Issue | None) -> Exception:
    return RuntimeError("the process group is gone") if group is None else group._stuck("Future.wait")


def _one_after_another(first: Callable[[], None] | None, second: Callable[[], None]) -> Callable[[], None]:
    if first is None:
        return second

    def both() -> None:
        first()
        second()

    return both
