"""Processes that play episodes: kept between episodes, or made for one that ends them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from soaking import rank as soaking_rank
from soaking.rank import Footprint, Task

_context = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Import the modules of ranks in the fork server, so that a world costs milliseconds."""
    _context.set_forkserver_preload(
        ["torch", "torch._dynamo", "torch.distributed", "numpy", "zcomm", "zcomm._core", "zcomm.zero", "soaking.rank"]
    )


class Hung(Exception):
    """An episode passed its time; the text has the stacks of all ranks."""


@dataclass
class Answer:
    """Answer of a rank at the end of its task; `kind` is done, failed, ended (by SIGTERM) or died."""

    kind: str
    value: Any = None
    text: str = ""
    footprint: Footprint | None = None


@dataclass
class World:
    """Ranks 0 to n - 1, a process each."""

    world_size: int
    folder: Path
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(self.world_size):
            mine, theirs = _context.Pipe()
            log = self.folder / f"rank{rank}.log"
            process = _context.Process(target=soaking_rank.main, args=(theirs, str(log)), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(mine)
            self.logs.append(log)

    def send(self, tasks: list[Task]) -> None:
        for log, pipe, task in zip(self.logs, self.pipes, tasks, strict=True):
            with contextlib.suppress(OSError):
                os.truncate(log, 0)  # only of this task
            pipe.send(task)

    def signal(self, rank: int, number: int) -> None:
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, number)

    def stacks(self) -> str:
        """Return the stacks of all threads of all ranks that live, with the ends of their logs."""
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        logs = [(log, log.read_text(errors="replace")) for log in self.logs if log.exists()]
        return "\n".join(f"-- {log.stem}\n{text[-6000:]}" for log, text in logs)

    def close(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            pipe.close()
            process.join(0.5)
            if process.exitcode is None:
                process.kill()
                process.join()

    @property
    def whole(self) -> bool:
        return all(process.is_alive() for process in self.processes)


@dataclass
class Strike:
    """A signal for one rank, a while after it has begun a step."""

    rank: int
    number: int
    step: int
    delay_s: float
    due: float | None = None
    struck: bool = False


def play(
    worlds: list[World], tasks: list[list[Task]], limit_s: float, strike: Strike | None = None
) -> list[list[Answer]]:
    """Return the answers of all ranks of all worlds, which play at the same time. Raises: Hung."""
    for world, of_world in zip(worlds, tasks, strict=True):
        world.send(of_world)
    waiting = {pipe: (w, rank) for w, world in enumerate(worlds) for rank, pipe in enumerate(world.pipes)}
    answers = [[Answer("died") for _ in world.pipes] for world in worlds]
    deadline = time.monotonic() + limit_s
    while waiting:
        now = time.monotonic()
        if now > deadline:
            late = [f"job {w} rank {rank}" for w, rank in waiting.values()]
            text = "\n".join(world.stacks() for world in worlds)
            raise Hung(f"{', '.join(late)} still at it after {limit_s:g} s\n{text}")
        patience = deadline - now
        if strike is not None and strike.due is not None and not strike.struck:
            if now >= strike.due:
                strike.struck = True
                worlds[0].signal(strike.rank, strike.number)
                continue
            patience = strike.due - now
        for pipe in wait(list(waiting), timeout=patience):
            assert isinstance(pipe, Connection)
            w, rank = waiting[pipe]
            try:
                message = pipe.recv()
            except (EOFError, ConnectionError):
                del waiting[pipe]
                continue
            if message[0] == "at":
                if (
                    strike is not None
                    and w == 0
                    and rank == strike.rank
                    and message[1] == strike.step
                    and not strike.due
                ):
                    strike.due = time.monotonic() + strike.delay_s
                continue
            del waiting[pipe]
            if message[0] == "done":
                answers[w][rank] = Answer("done", message[1], footprint=message[2])
            elif message[0] == "failed":
                answers[w][rank] = Answer("failed", message[1], message[2], message[3])
            else:
                answers[w][rank] = Answer(*message)
    return answers
