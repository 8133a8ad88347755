"""Supervisor: the process that starts the ranks, carries their output and judges their end: one event loop, no threads.

Life of a job:
- Start all ranks, and wait.
- After the first failure: `settle_s` for the others to end by themselves, then SIGTERM, then after `grace_s` SIGKILL.
- Or after a signal: forward it once, SIGKILL after `grace_s` or at a second one.
- End whatever descends from this process, remove the private directory, report.
Invariant: a rank is signalled only between its start and the collection of its status, so its pid is its own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from zcomm.launch import processes
from zcomm.launch.environment import error_file, free_port, rank_environment
from zcomm.launch.failure_report import RankEnd, first_failure, read_last_words, report
from zcomm.launch.job import Job
from zcomm.launch.oom import OomWatch
from zcomm.launch.output import ReaderGone, Stream, write_all

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Rank:
    """A started rank: its process and its pipes."""

    rank: int
    process: subprocess.Popen[bytes]
    streams: list[Stream]
    signalled: bool = False


class Supervisor:
    """Supervisor of one job. Use once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running: dict[int, Rank] = {}
        self._ends: list[RankEnd] = []
        self._tracebacks: dict[bytes, int] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._ended_by_signal: int | None = None
        self._terminate_at: float | None = None
        self._kill_at: float | None = None

    def run(self, mask: set[int | signal.Signals]) -> int:
        """Start the ranks, wait for their end and return the job's exit code. Unblocks signals to `mask` when ready."""
        self._oom = OomWatch()
        private = Path(tempfile.mkdtemp(prefix="zcomm-"))  # mode 0700: no other user can join or listen
        wakeup = self._catch_signals()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        try:
            try:
                self._start(private)
                self._loop(wakeup)
            except ReaderGone:
                self._ended_by_signal = self._ended_by_signal or signal.SIGPIPE
            finally:
                self._end_all()
            return self._conclude()
        finally:
            shutil.rmtree(private, ignore_errors=True)

    def _catch_signals(self) -> int:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in _SIGNALS:
            signal.signal(signum, lambda number, _frame: self._signals.append(number))
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # only to wake the selector
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return reader

    def _start(self, private: Path) -> None:
        port = free_port()
        self._private = private
        seen: set[bytes] | None = set() if self._job.once else None
        if self._job.tee:
            self._job.tee.mkdir(parents=True, exist_ok=True)
        for rank in range(self._job.world_size):
            if self._signals:
                return
            environment = rank_environment(os.environ, self._job.environment, rank, self._job.world_size, port, private)
            self._spawn(rank, environment, seen)

    def _spawn(self, rank: int, environment: dict[str, str], seen: set[bytes] | None) -> None:
        supervisor = os.getpid()

        def in_child() -> None:
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
            processes.die_with_parent(supervisor)

        process = subprocess.Popen(
            self._job.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if self._job.inherit_stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=in_child,
        )
        streams = []
        prefix = f"[{rank}] ".encode() if self._job.prefix else b""
        for pipe, target, name in ((process.stdout, 1, "out"), (process.stderr, 2, "err")):
            if pipe is not None:
                tee = (self._job.tee / f"rank{rank}.{name}").open("wb") if self._job.tee else None
                only = self._job.only_rank
                stream = Stream(
                    os.dup(pipe.fileno()),
                    target,
                    prefix,
                    tee,
                    seen if target == 2 else None,
                    tracebacks=self._tracebacks if target == 2 else None,
                    rank=rank,
                    alone=only is not None or self._job.world_size == 1,
                    shown=only is None or only == rank,
                )
                pipe.close()
                self._selector.register(stream.source, selectors.EVENT_READ, stream)
                streams.append(stream)
        self._running[process.pid] = Rank(rank, process, streams)

    def _loop(self, wakeup: int) -> None:
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        while self._running:
            deadlines = [t for t in (self._terminate_at, self._kill_at) if t is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(timeout):
                if key.data is None:
                    os.read(wakeup, 4096)
                elif not key.data.pump():
                    self._selector.unregister(key.fd)
            self._handle_signals()
            self._collect()
            self._act_on_deadlines()

    def _handle_signals(self) -> None:
        while self._signals:
            signum = self._signals.pop(0)
            if self._ended_by_signal is None:
                self._ended_by_signal = signum
                self._terminate_at = None
                self._kill_at = time.monotonic() + self._job.grace_s
                self._signal_ranks(signum)
            else:
                self._kill_at = time.monotonic()  # asked twice: no more patience

    def _signal_ranks(self, signum: int) -> None:
        for pid, rank in self._running.items():
            rank.signalled = True
            for stream in rank.streams:
                stream.hold()
            processes.send(pid, signum)

    def _collect(self) -> None:
        for pid, code, peak_nbytes in processes.reap():
            rank = self._running.pop(pid, None)
            if rank is None:
                continue  # an orphan that came to us
            rank.process.returncode = code
            self._end_session(pid)
            for stream in rank.streams:
                if stream.source in self._selector.get_map():
                    self._selector.unregister(stream.source)
                stream.close()
            error, message = read_last_words(error_file(self._private, rank.rank))
            end = RankEnd(rank.rank, pid, code, peak_nbytes, by_launcher=rank.signalled, error=error, message=message)
            if code == -signal.SIGKILL and not rank.signalled:
                end.oom_counter = self._oom.risen()
            end.stderr_tail = list(rank.streams[-1].tail)
            end.exception = rank.streams[-1].exception
            self._ends.append(end)
            if end.failed and self._terminate_at is None and self._ended_by_signal is None and self._kill_at is None:
                self._terminate_at = time.monotonic() + self._job.settle_s

    def _end_session(self, session: int) -> None:
        """End what a rank started and left behind. [Stragglers that left the session end with the job.]"""
        for pid, its_session in processes.descendants().items():
            if its_session == session:
                processes.send(pid, signal.SIGTERM)

    def _act_on_deadlines(self) -> None:
        now = time.monotonic()
        if self._terminate_at is not None and now >= self._terminate_at:
            self._terminate_at = None
            self._kill_at = now + self._job.grace_s
            self._signal_ranks(signal.SIGTERM)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + 1.0
            for pid, rank in self._running.items():
                rank.signalled = True
                processes.send(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """End all processes that still descend from this one; the streams of ranks that were cut off are let go."""
        for pid, rank in self._running.items():
            processes.send(pid, signal.SIGKILL)
            rank.process.returncode = -signal.SIGKILL
        self._running.clear()
        processes.end_descendants()

    def _conclude(self) -> int:
        first = first_failure(self._ends)
        lines: list[str] = []
        if first is not None:
            lines = report(self._ends, self._job.announce, show_tail=self._job.world_size > 1)
            code = first.exit_code
        elif self._ended_by_signal is not None:
            signum = self._ended_by_signal
            code = 128 + signum
            if signum != signal.SIGPIPE:
                lines = [f"{self._job.announce}: stopped by {processes.signal_name(signum)}; all ranks have ended"]
        else:
            code = 0
        with contextlib.suppress(ReaderGone):
            write_all(2, "".join(line + "\n" for line in lines).encode())
        return code
