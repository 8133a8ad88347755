"""A rank of a soak's world: a process that plays the episodes that it is sent, one after the other.

It sends back: ("at", step) while it trains, then ("done", result) or ("failed", kind, text). A signal interrupts it
only during an episode, and is ignored at other times.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from soaking.plan import Episode, Training


@dataclass(frozen=True)
class Task:
    """The task of a rank: an episode's job, or its collectives."""

    episode: Episode
    job: int
    rank: int
    world_size: int
    folder: str
    store: str
    resume: bool = False


@dataclass(frozen=True)
class Result:
    """digest: of the bits of all weights. wrong: differences from plain torch (from rank 0), empty if none."""

    digest: str = ""
    wrong: str = ""


@dataclass(frozen=True)
class Footprint:
    """The resources that a process holds between episodes."""

    descriptors: int
    threads: int
    resident_mb: float


class Interruptible:
    """Handlers of SIGINT and SIGTERM that raise in the main thread, but only while an episode runs."""

    def __init__(self) -> None:
        self.open = False
        signal.signal(signal.SIGINT, self._interrupt)
        signal.signal(signal.SIGTERM, self._terminate)

    def _interrupt(self, number: int, frame: object) -> None:
        if self.open:
            self.open = False
            raise KeyboardInterrupt

    def _terminate(self, number: int, frame: object) -> None:
        """Leave as preempted jobs do: shut zcomm down, then end."""
        import zcomm

        if self.open:
            self.open = False
            zcomm.shutdown()
            raise SystemExit(0)


def main(pipe: Connection, log: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the soak
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable(file=descriptor)
    faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
    import torch

    from soaking.program import quiet

    torch.set_num_threads(1)
    quiet()
    signals = Interruptible()
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        if task is None:
            return
        try:
            pipe.send(("done", _play(task, pipe, signals), _footprint()))
        except SystemExit:
            pipe.send(("ended", "SystemExit", ""))
            raise
        except BaseException as error:
            sys.stderr.write(traceback.format_exc())
            answer = ("failed", type(error).__name__, f"{error}\n{traceback.format_exc()}")
            _end(error)
            del error
            pipe.send((*answer, _footprint()))


def _play(task: Task, pipe: Connection, signals: Interruptible) -> Result:
    import zcomm
    from soaking import groups, messages

    try:
        signals.open = True
        comm = zcomm.init(timeout=30.0, rank=task.rank, world_size=task.world_size, init_method=f"file://{task.store}")
        if task.episode.kind == "collectives":
            result = Result(wrong=messages.play(task.episode, comm, task.store))
        elif task.episode.kind == "groups":
            result = Result(wrong=groups.play(task.episode, comm))
        else:
            result = _train(task, task.episode.jobs[task.job], comm, pipe)
        zcomm.shutdown()
        return result
    finally:
        signals.open = False


def _train(task: Task, job: Training, comm: Any, pipe: Connection) -> Result:
    from soaking.program import ZeroTrainer, distance, drive, unequal_rate

    trainer = ZeroTrainer(job, comm, Path(task.folder))
    try:
        first = trainer.resume() if task.resume else 0
        drive(trainer, job, first, lambda step: pipe.send(("at", step)))
        if task.episode.kind == "unequal-rate":
            return Result(wrong=unequal_rate(trainer, job, comm.rank))
        weights = trainer.optimizer.full_state_dict()
        sha = hashlib.sha256()
        for name in sorted(weights):
            sha.update(weights[name].contiguous().view(-1).float().numpy().tobytes())
        return Result(sha.hexdigest()[:16], distance(weights, job, task.world_size) if comm.rank == 0 else "")
    finally:
        trainer.close()


def _end(error: BaseException) -> None:
    """Leave the job in any state."""
    import zcomm

    error.__traceback__ = None
    zcomm.shutdown()


def _footprint() -> Footprint:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(
        len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    )
