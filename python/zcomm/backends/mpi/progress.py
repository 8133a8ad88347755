"""Progress: runs operations with MPI requests as their steps, with deadlines, notices and one lasting failure.

An operation is a generator that yields the requests it waits for (a Task drives it). MPI moves bytes only while a
thread calls it, so a waiting thread polls all operations. If MPI allows calls from several threads
(MPI_THREAD_MULTIPLE, mpi4py's default), another thread polls while asynchronous operations are in flight.
Invariants: collectives run one at a time in call order. Messages run concurrently with them. After a failure every task
has ended and every later call repeats it. Buffers of requests that a failure left unfinished are never freed.
Thread rule: free-threaded under one lock per communicator, or per process if MPI is not THREAD_MULTIPLE.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence

from mpi4py import MPI

from zcomm import _core
from zcomm.backends.mpi.notices import Notice, Notices
from zcomm.bootstrap.deadlines import Deadlines

Steps = Generator[Sequence[MPI.Request], None, None]

_log = logging.getLogger("zcomm")
NOTICE_PERIOD_S = 0.02
LAST_WORDS_S = 0.25
_process_lock = threading.RLock()
_abandoned: list[object] = []  # frames and buffers that MPI may still write to


class Task:
    """One operation from call to end. ``entering`` while it waits for the other ranks to call it."""

    def __init__(self, steps: Callable[[Task], Steps], describe: Callable[[], str], peer: int = -1) -> None:
        self.steps = steps(self)
        self.describe = describe
        self.peer = peer  # of a message; -1: any rank
        self.revocable = False  # a recv without a matched message
        self.requests: list[MPI.Request] = []
        self.sequence = 0
        self.started = 0.0  # 0: not yet
        self.deadline = 0.0
        self.warn_at = math.inf
        self.has_warned = False
        self.entering = False
        self.ended = False
        self.error: BaseException | None = None


class Pause:
    """Pause between polls: yields for an instant, then sleeps, as ranks may outnumber CPUs."""

    def __init__(self) -> None:
        self._turns = 0

    def __call__(self) -> None:
        self._turns += 1
        time.sleep(0 if self._turns < 20 else 50e-6 if self._turns < 1000 else 500e-6)


class Progress:
    def __init__(self, comm: MPI.Intracomm, deadlines: Deadlines) -> None:
        multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._lock = threading.RLock() if multiple else _process_lock
        self._has_thread = multiple
        self._timeout = deadlines.limit_s  # mpirun ends the job when a rank dies, so a late rank is alive
        self._warn_s = deadlines.warn_s
        self._rank = comm.rank
        self._notices = Notices(comm)
        self._collectives: deque[Task] = deque()
        self._messages: list[Task] = []
        self._sequence = 0
        self._stepping: Task | None = None
        self._refused: dict[int, str] = {}  # rank -> why it refused a small message of this rank
        self._next_look = 0.0
        self._suspensions = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._work_there = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None

    # --- starting and ending tasks ------------------------------------------------------------------------------

    def submit(self, task: Task, collective: bool, blocking: bool) -> None:
        """Queue ``task``; a blocking one has ended when this returns, and its error is raised here."""
        with self._lock:
            self.require_usable(task.describe)
            if collective:
                self._sequence += 1
                task.sequence = self._sequence
                self._collectives.append(task)
            else:
                self._messages.append(task)
                self._next_look = 0.0  # an earlier message may have been refused
            self.poll()
            if not blocking and not task.ended and self._has_thread:
                self._wake_thread()
        if blocking:
            self.wait(task, None)

    def wait(self, task: Task, timeout: float | None) -> None:
        """Wait until ``task`` ended; raise its error, or TimeoutError if ``timeout`` passes first."""
        until = None if timeout is None else time.monotonic() + timeout
        pause = Pause()
        try:
            while not self._moved_to_end(task):
                if until is not None and time.monotonic() >= until:
                    raise TimeoutError(f"Work.wait: not done after {timeout:g} s; the operation goes on")
                pause()
        except KeyboardInterrupt as interrupt:  # the other ranks must not wait for this one
            with self._lock:
                self._fail(interrupt)
            raise
        if task.error is not None:
            raise task.error

    def _moved_to_end(self, task: Task) -> bool:
        if not task.ended:
            self.poll()
        return task.ended

    def done(self, task: Task) -> bool:
        if not task.ended and self._lock.acquire(blocking=False):
            try:
                self.poll()
            finally:
                self._lock.release()
        return task.ended

    def require_usable(self, describe: Callable[[], str]) -> None:
        if self._closed:
            raise RuntimeError(f"{describe()}: the communicator is closed")
        if self._failure is not None:
            raise _repeated(self._failure)

    # --- polling ------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Advance every task that can advance; never blocks for long."""
        with self._lock:
            try:
                self._look_around()
                while self._collectives and self._step(self._collectives[0]):
                    self._collectives.popleft()
                self._messages = [task for task in self._messages if not self._step_message(task)]
            except BaseException as error:
                self._fail(error)
                if not isinstance(error, Exception):
                    raise

    def _step(self, task: Task) -> bool:
        """Advance ``task``; return True if it has ended."""
        if task.ended:
            return True
        if task.started == 0.0:
            task.started = time.monotonic()
            task.deadline = task.started + self._timeout
            task.warn_at = task.started + self._warn_s
        self._stepping = task
        while not task.requests or MPI.Request.Testall(task.requests):
            try:
                task.requests = list(next(task.steps))
            except StopIteration:
                task.ended = True
                self._stepping = None
                if task.has_warned:
                    _log.warning("%s: ended after %.3g s", task.describe(), time.monotonic() - task.started)
                return True
            task.deadline = time.monotonic() + self._timeout  # progress restarts the deadline
            task.warn_at = time.monotonic() + self._warn_s
        self._stepping = None
        self._need_peers(task)
        if time.monotonic() >= task.deadline:
            self._give_up(task)
        if time.monotonic() >= task.warn_at:
            self._warn(task)
        return False

    def _step_message(self, task: Task) -> bool:
        """Advance a message; an error of one message ends only it (docs/errors.md, "send and recv")."""
        try:
            for peer in (task.peer,) if task.peer >= 0 else tuple(self._refused):
                if not task.ended and peer in self._refused:
                    raise _core.CollectiveMismatch(self._refused.pop(peer))
            return self._step(task)
        except (_core.CollectiveMismatch, _core.PeerLost) as error:
            self._drop(task, error)
            refused = getattr(error, "sender", None)
            if refused is not None:
                self._notices.send(Notice.MISMATCH, text=str(error), only=refused)
        except TimeoutError as error:
            if not task.revocable:
                raise
            if not _take_back(task.requests):
                return False  # its message arrived before the cancel
            self._drop(task, error)
        self._stepping = None
        return True

    def _drop(self, task: Task, error: BaseException) -> None:
        for request in task.requests:
            if request != MPI.REQUEST_NULL:
                _abandoned.append((request, task.steps))
                _cancel(request)
        task.error, task.ended = error, True

    def _look_around(self) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + NOTICE_PERIOD_S
        head = self._collectives[0] if self._collectives else None
        waiting_for = head.sequence if head is not None and head.entering else 0
        if head is not None and waiting_for and now - head.started > min(1.0, self._timeout / 4):
            self._notices.send_here(waiting_for)
        notice = self._notices.receive(waiting_for)
        self._notices.flush()
        if notice is not None:
            kind, peer, text = notice
            if kind is not Notice.MISMATCH:
                raise TimeoutError(text) if kind is Notice.TIMED_OUT else RuntimeError(f"rank {peer} failed: {text}")
            self._refused[peer] = text
        if self._suspensions or self._notices.suspended:
            for task in (*self._collectives, *self._messages):
                task.deadline = max(task.deadline, now + self._timeout)
                task.warn_at = max(task.warn_at, now + self._warn_s)

    def _need_peers(self, task: Task) -> None:
        """Raise PeerLost if ``task`` waits for a rank that left. Operations that it completed before are valid."""
        for peer, (last, heard) in self._notices.left.items():
            if task.sequence:
                needed = task.sequence > last
            else:  # its last messages may still be in flight
                alone = task.peer < 0 and len(self._notices.left) == len(self._notices.here) - 1
                needed = (task.peer == peer or alone) and time.monotonic() - max(heard, task.started) > LAST_WORDS_S
            if needed:
                lost = _core.PeerLost(
                    f"rank {peer} left (closed its communicator or said goodbye) while others needed it; "
                    f"{task.describe()} cannot finish"
                )
                lost.rank = lost.group_rank = peer
                raise lost

    def _during(self) -> str:
        task = self._collectives[0] if self._collectives else self._messages[0] if self._messages else None
        return "no operation" if task is None else task.describe()

    def _give_up(self, task: Task) -> None:
        if task.sequence:
            self._next_look = 0.0
            self._look_around()  # last notices of ranks that entered late or failed before
        if time.monotonic() < task.deadline:
            return  # suspended
        waited = f"{task.describe()}: rank {self._rank} waited {self._timeout:g} s"
        if task.entering and (missing := self._notices.missing(task.sequence)):
            late = ", ".join(map(str, missing))
            raise TimeoutError(f"{waited} for rank {late} to enter it")
        raise TimeoutError(f"{waited} for data; a rank or the link to it may have stopped")

    def _warn(self, task: Task) -> None:
        """Log late ranks once: the lowest of the ranks that wait to enter an operation logs for all."""
        task.warn_at = math.inf
        missing = self._notices.missing(task.sequence) if task.sequence and task.entering else []
        if missing and self._rank != min(set(range(len(self._notices.here))) - set(missing)):
            return
        late = f"for rank {', '.join(map(str, missing))} to enter it" if missing else "for data"
        task.has_warned = True
        _log.warning("%s: rank %d has waited %.3g s %s", task.describe(), self._rank, self._warn_s, late)

    # --- failing, suspending, closing -----------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """End all tasks, and send the first failure to the other ranks."""
        if self._failure is None and not self._closed:
            self._failure = _repeated(error)  # without the frames that ``error`` holds
            if isinstance(error, TimeoutError):
                self._send_notice(Notice.TIMED_OUT, str(error))
            elif not isinstance(error, (_core.PeerLost, _core.CollectiveMismatch)):  # the others raise these themselves
                self._send_notice(Notice.FAILED, f"{self._during()}: {error or type(error).__name__}")
        self._end_all(error)

    def _send_notice(self, kind: Notice, text: str = "", sequence: int = 0) -> None:
        with contextlib.suppress(MPI.Exception):  # then the other ranks detect the failure themselves
            self._notices.send(kind, sequence, text)

    def _end_all(self, error: BaseException) -> None:
        """End every task: the failed task with ``error``, the others with a repetition of it."""
        first, self._stepping = self._stepping, None
        pending = [task for task in (*self._collectives, *self._messages) if not task.ended]
        self._collectives.clear()
        self._messages.clear()
        for task in sorted(pending, key=lambda task: task is not first):
            self._drop(task, error if isinstance(error, Exception) else _repeated(error))
            error = _repeated(error)

    def suspend(self, by: int) -> None:
        with self._lock:
            self.require_usable(lambda: "no_deadline")
            was, self._suspensions = self._suspensions, self._suspensions + by
            if (was > 0) != (self._suspensions > 0):
                self._notices.send(Notice.SUSPENDED if by > 0 else Notice.RESUMED)

    def close(self) -> None:
        """End pending tasks with an error, and notify the other ranks. Idempotent."""
        with self._lock:
            if self._closed:
                return
            if self._failure is None and not MPI.Is_finalized():
                last = self._collectives[0].sequence - 1 if self._collectives else self._sequence
                self._send_notice(Notice.LEFT, sequence=last)
            self._closed = True
            self._end_all(RuntimeError("the communicator was closed while an operation was running"))
            self._work_there.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- the thread ---------------------------------------------------------------------------------------------

    def _wake_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="zcomm-mpi", daemon=True)
            self._thread.start()
        self._work_there.notify()

    def _loop(self) -> None:
        pause = Pause()
        while True:
            with self._lock:
                while not self._closed and not self._collectives and not self._messages:
                    self._work_there.wait()
                    pause = Pause()
                if self._closed:
                    return
                self.poll()
            pause()


def _take_back(requests: Sequence[MPI.Request]) -> bool:
    """Cancel receives; return True if all were cancelled. A receive with a matched message completes instead."""
    taken = True
    for request in requests:
        status = MPI.Status()
        request.Cancel()
        request.Wait(status)
        taken = taken and status.Is_cancelled()
    return taken


def _cancel(request: MPI.Request) -> None:
    """Cancel a receive that has no message yet; MPI cancels nothing else (MPI 4.0, section 3.8.4)."""
    with contextlib.suppress(MPI.Exception):  # a collective or a send remains in flight
        request.Cancel()
        request.Test()


def _repeated(error: BaseException) -> BaseException:
    """Return an error of the same type that names the first failure of the communicator."""
    first = str(error) or type(error).__name__
    prefix = "the communicator is unusable since: "
    text = first if first.startswith(prefix) else prefix + first
    if isinstance(error, _core.PeerLost):
        lost = _core.PeerLost(text)
        lost.rank, lost.group_rank = error.rank, error.group_rank
        return lost
    for kind in (TimeoutError, _core.CollectiveMismatch, NotImplementedError):
        if isinstance(error, kind):
            return kind(text)
    return RuntimeError(text)


class MpiWork:
    """The handle of an asynchronous operation; dropping it waits for the end."""

    __slots__ = ("_progress", "_task")

    def __init__(self, progress: Progress, task: Task) -> None:
        self._progress = progress
        self._task = task

    @property
    def inner(self) -> object:
        """Refuse to be awaited by another communicator: MPI progresses only in waits. Raises: NotImplementedError."""
        raise NotImplementedError("after: an operation of backend mpi cannot be awaited; use work.wait()")

    def wait(self, timeout: float | None = None) -> None:
        self._progress.wait(self._task, timeout)

    def done(self) -> bool:
        return self._progress.done(self._task)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a destructor cannot raise
            self._progress.wait(self._task, None)
