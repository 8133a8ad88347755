"""Supervisor: the process that starts the ranks, forwards their output and judges their end, in one event loop.

It has no threads. It starts this host's ranks; for a job on several nodes, `nodes.NodeSupervisor` starts the nodes.

Life of a job:
- Start all ranks, and wait.
- After the first failure: `settle_s` for the others to end by themselves, then SIGTERM, then after `grace_s` SIGKILL.
- Or after a signal: forward it once, SIGKILL after `grace_s` or at a second one.
- End all descendants of this process, remove the private directory, report.
Invariant: a rank is signalled only between its start and the collection of its status, so its pid is its own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zcomm.launch import elastic, processes
from zcomm.launch.cores import cores_of
from zcomm.launch.environment import error_file, free_port, rank_environment
from zcomm.launch.failure_report import RankEnd, first_failure, read_last_words, report
from zcomm.launch.job import Job
from zcomm.launch.oom import OomWatch
from zcomm.launch.output import ReaderGone, Stream, write_all

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Child:
    """A started process: a rank by its number, or the program that starts a node by the node's, and its pipes.

    orders: how often it was asked to end after the time to do so by itself had passed.
    """

    number: int
    process: subprocess.Popen[bytes]
    streams: list[Stream]
    signalled: bool = False
    orders: int = 0


class Supervisor:
    """Supervisor of the ranks that one host starts. Use once."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._running: dict[int, Child] = {}
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

    def refuse(self, message: str) -> None:
        """Print why nothing could be started."""
        print(f"{self._job.announce}: error: {message}", file=sys.stderr, flush=True)

    def _start(self, private: Path) -> None:
        """Start the ranks. private: directory that goes with the job. Raises: OSError, ValueError for their cores."""
        port = self._job.port or free_port()
        self._private = private
        self._seen: set[bytes] | None = set() if self._job.once else None
        if self._job.tee:
            self._job.tee.mkdir(parents=True, exist_ok=True)
        job = self._job
        if job.elastic is not None:
            rank = job.ranks[0]
            environment = elastic.environment({**os.environ, **job.environment}, error_file(private, rank))
            self._spawn_rank(rank, elastic.command(job, port), environment)
            return
        for rank in job.ranks:
            if self._signals:
                return
            local_rank, count = rank - job.ranks[0], len(job.ranks)
            environment = rank_environment(os.environ, job.environment, rank, job.world_size, port, private, job.place)
            if job.devices is not None:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(job.devices)
            if job.deepspeed:
                node, nodes = (job.place.node, job.place.nodes) if job.place else (0, 1)
                environment.update(CROSS_RANK=str(node), CROSS_SIZE=str(nodes), LOCAL_SIZE=str(count))
            argv = list(job.argv)
            if job.local_rank_at is not None:
                argv.insert(job.local_rank_at, f"--local_rank={local_rank}")
            cores = None if job.cores is None else cores_of(job.cores, count, local_rank)
            if cores:
                environment["OMP_NUM_THREADS"] = str(len(cores))
            self._spawn_rank(rank, argv, environment, cores)

    def _spawn_rank(
        self, rank: int, argv: list[str], environment: dict[str, str], cores: list[int] | None = None
    ) -> None:
        job = self._job
        prefix = f"[{rank}] ".encode() if job.prefix else b""

        def stream(pipe: int, target: int) -> Stream:
            name = "out" if target == 1 else "err"
            return Stream(
                pipe,
                target,
                prefix,
                (job.tee / f"rank{rank}.{name}").open("wb") if job.tee else None,
                self._seen if target == 2 else None,
                tracebacks=self._tracebacks if target == 2 else None,
                rank=rank,
                alone=job.single,
                shown=job.shown and job.only_rank in (None, rank),
            )

        self._spawn(rank, argv, environment, stream, cores=cores)

    def _spawn(
        self,
        number: int,
        argv: list[str],
        environment: dict[str, str],
        stream: Callable[[int, int], Stream],
        *,
        cores: list[int] | None = None,
        takes_orders: bool = False,
        parting: int = signal.SIGKILL,
    ) -> Child:
        """Start a process. stream: returns the Stream from a pipe to this process's descriptor 1 or 2. takes_orders:
        its standard input is a pipe. parting: signal to it when this process has died.
        """
        supervisor = os.getpid()

        def in_child() -> None:
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
            if cores:
                os.sched_setaffinity(0, cores)
            processes.die_with_parent(supervisor, parting)

        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.PIPE if takes_orders else subprocess.DEVNULL,
            stdout=None if self._job.inherit_stdout else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=in_child,
        )
        streams = []
        for pipe, target in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                made = stream(os.dup(pipe.fileno()), target)
                pipe.close()
                self._selector.register(made.source, selectors.EVENT_READ, made.pump)
                streams.append(made)
        self._running[process.pid] = child = Child(number, process, streams)
        return child

    def _loop(self, wakeup: int) -> None:
        self._selector.register(wakeup, selectors.EVENT_READ, lambda: bool(os.read(wakeup, 4096)))
        while self._running:
            deadlines = [t for t in self._deadlines() if t is not None]
            timeout = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
            for key, _ in self._selector.select(timeout):
                if not key.data():
                    self._selector.unregister(key.fd)
            self._handle_signals()
            self._collect()
            self._act_on_deadlines()

    def _deadlines(self) -> list[float | None]:
        """Return the times (monotonic) at which `_act_on_deadlines` has something to do; None: never."""
        return [self._terminate_at, self._kill_at]

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
        for child in self._running.values():
            child.signalled = True
            for stream in child.streams:
                stream.hold()
            self._ask(child, signum)

    def _ask(self, child: Child, signum: int) -> None:
        """Ask a process to end: pass a signal on."""
        processes.send(child.process.pid, signum)

    def _insist(self, child: Child) -> None:
        """End a process that was asked, and has had its time."""
        processes.send(child.process.pid, signal.SIGKILL)

    def _collect(self) -> None:
        for pid, code, peak_nbytes in processes.reap():
            child = self._running.pop(pid, None)
            if child is None:
                continue  # an adopted orphan
            child.process.returncode = code
            self._end_session(pid)
            for stream in child.streams:
                if stream.source in self._selector.get_map():
                    self._selector.unregister(stream.source)
                stream.close()
            if child.process.stdin:
                child.process.stdin.close()
            self._ended(child, code, peak_nbytes)

    def _ended(self, child: Child, code: int, peak_nbytes: int) -> None:
        """Judge the end of a process."""
        rank, stderr = child.number, child.streams[-1]
        error, message = read_last_words(error_file(self._private, rank))
        by_launcher = child.signalled
        end = RankEnd(rank, child.process.pid, code, peak_nbytes, by_launcher, error=error, message=message)
        if code == -signal.SIGKILL and not child.signalled:
            end.oom_counter = self._oom.risen()
        end.stderr_tail = list(stderr.tail)
        end.exception = stderr.exception
        self._record(end)

    def _record(self, end: RankEnd) -> None:
        """Keep an end for the report. The first failure leaves the others their time to end by themselves."""
        self._ends.append(end)
        if end.failed and not self._is_ending and self._job.elastic is None:
            self._terminate_at = time.monotonic() + self._job.settle_s

    @property
    def _is_ending(self) -> bool:
        """True after the first failure or signal."""
        return any(each is not None for each in (self._terminate_at, self._kill_at, self._ended_by_signal))

    def _end_session(self, session: int) -> None:
        """End the remaining processes of a rank's session. Processes that left the session end with the job."""
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
            for child in self._running.values():
                child.signalled = True
                self._insist(child)

    def _end_all(self) -> None:
        """End all descendants of this process; close the streams of ranks that were cut off."""
        for pid, child in self._running.items():
            processes.send(pid, signal.SIGKILL)
            child.process.returncode = -signal.SIGKILL
        self._running.clear()
        processes.end_descendants()

    def _conclude(self) -> int:
        """Print the verdict and return the exit code."""
        code, lines = self._judge()
        with contextlib.suppress(ReaderGone):
            write_all(2, "".join(line + "\n" for line in lines).encode())
        return code

    def _judge(self) -> tuple[int, list[str]]:
        """Return the exit code, and the lines that say why it is not 0."""
        first = first_failure(self._ends)
        if first is not None:
            show_tail = self._job.world_size > 1 or not self._job.shown or bool(first.program)
            return first.exit_code, report(self._ends, self._job.announce, show_tail=show_tail)
        signum = self._ended_by_signal
        if signum is None:
            return 0, []
        if signum == signal.SIGPIPE:
            return 128 + signum, []
        line = f"{self._job.announce}: stopped by {processes.signal_name(signum)}; all ranks have ended"
        return 128 + signum, [line]
