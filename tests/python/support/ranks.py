"""Runs a function as N ranks, one process each, and collects each one's value or error.

Ranks are forked from a fork server that has imported all modules once. A world costs milliseconds and not N imports
(torch imports torch._dynamo when the first optimizer is made: 1.5 s).
Each rank has its own log file, and on a deadline the failure's text has the stacks of all its threads.
The kernel kills a rank when the fork server ends, so no process outlives the test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from limits import Limit

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["preload"])


def start_server() -> None:
    """Start the fork server, or do nothing if it runs. It imports `preload` before it knows our sys.path."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.dirname(__file__), before)))
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def start_process(target: Callable[..., None], *args: Any) -> Any:
    """Start a process of the fork server, which dies with this one."""
    start_server()
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


@dataclass(frozen=True)
class RankError:
    """An exception of a rank, by names, so that it can be sent without its class."""

    kinds: tuple[str, ...]  # class names from the exception's own to its bases
    message: str
    trace: str
    rank: int | None = None  # attribute of PeerLost
    errno: int | None = None

    @property
    def kind(self) -> str:
        return self.kinds[0]


@dataclass
class RankResult:
    """Outcome of one rank: `value` when the function returned, `error` when it raised, neither when it died."""

    rank: int
    value: Any = None
    error: RankError | None = None
    exitcode: int | None = None  # -9: killed
    log: str = ""

    def describe(self) -> str:
        end = f"raised\n{self.error.trace}" if self.error else f"exit code {self.exitcode}"
        return f"-- rank {self.rank}: {end}\n{self.log[-4000:]}"


@dataclass
class World:
    """Running ranks; `join` collects them."""

    processes: list[Any]
    pipes: list[Connection]
    logs: list[Path]
    results: list[RankResult] = field(default_factory=list)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank and return the time, by time.monotonic (the same clock in all processes)."""
        now = time.monotonic()
        os.kill(self.processes[rank].pid, number)
        return now

    def join(self, timeout_s: float = 90.0) -> list[RankResult]:
        """Wait for all ranks. AssertionError with their stacks if one still runs after the Limit `timeout_s`."""
        limit = Limit(timeout_s)
        received: dict[int, tuple[str, Any]] = {}
        open_pipes = dict(enumerate(self.pipes))
        while open_pipes and (left_s := limit.left_s()):
            for pipe in wait(list(open_pipes.values()), timeout=left_s):
                rank = next(r for r, p in open_pipes.items() if p is pipe)
                with contextlib.suppress(EOFError, ConnectionError):
                    received[rank] = pickle.loads(pipe.recv_bytes())
                del open_pipes[rank]
        for process in self.processes:
            process.join(limit.left_s())
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # stacks of all threads to the log
        if late:
            time.sleep(0.5)
        self.close()
        self.results = [
            RankResult(rank, exitcode=process.exitcode, log=self.logs[rank].read_text(errors="replace"))
            for rank, process in enumerate(self.processes)
        ]
        for rank, (kind, payload) in received.items():
            setattr(self.results[rank], kind, payload)
        if late:
            texts = "\n".join(result.describe() for result in self.results)
            raise AssertionError(f"ranks {late} still ran after {timeout_s} s\n{texts}")
        return self.results

    def close(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
                process.join()
        for pipe in self.pipes:
            pipe.close()


def start_ranks(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> World:
    """Start `function(*args)` in `world_size` processes with the variables that `zcomm run` would set."""
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ZCOMM_INIT_METHOD": f"file://{folder}/store",
        "ZCOMM_JOB_ID": f"test {folder}",
    }
    world = World([], [], [])
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        log = folder / f"rank{rank}.log"
        log.touch()
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
        process = start_process(_rank_main, function, args, variables, str(log), theirs)
        theirs.close()  # now only the rank holds it, so its death closes the pipe
        world.processes.append(process)
        world.pipes.append(mine)
        world.logs.append(log)
    return world


def _rank_main(
    function: Callable[..., Any], args: tuple[Any, ...], env: dict[str, str], log: str, pipe: Connection
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    os.environ.update(env)
    import torch

    torch.set_num_threads(1)
    try:
        message = ("value", function(*args))
        job = sys.modules.get("zcomm.comm.job")  # loaded by the first use of zcomm
        if job is not None and job.is_initialized():
            job.shutdown()
    except BaseException as error:
        traceback.print_exc()
        message = ("error", _to_error(error))
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()


def _to_error(error: BaseException) -> RankError:
    return RankError(
        kinds=tuple(kind.__name__ for kind in type(error).__mro__),
        message=str(error),
        trace="".join(traceback.format_exception(error)),
        rank=getattr(error, "rank", None),
        errno=getattr(error, "errno", None),
    )
