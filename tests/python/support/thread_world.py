"""A world with threads of this process as its ranks: starts in milliseconds, and its devices reach each other."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import sizes
import zcomm
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined

Result = TypeVar("Result")


def thread_world(world_size: int, folder: Path, body: Callable[[Joined], Result]) -> list[Result]:
    """Return the value of ``body`` on each rank.

    ``body`` gets the input of a Communicator, in host memory, and closes it.
    """
    failed: list[str] = []
    store = f"file://{folder}/store" if world_size > 1 else None
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            job = rendezvous.Job(rank, world_size, rank, store, "a test", name="threads")
            results[rank] = body(rendezvous.join(job, "shm", Deadlines.exactly(30.0), 1))
        except BaseException:
            failed.append(f"rank {rank}: {traceback.format_exc()}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, "\n".join(failed)
    return [results[rank] for rank in range(world_size)]


def ranks(world_size: int, folder: Path, body: Callable[[zcomm.Communicator], Result]) -> list[Result]:
    """Return the value of ``body`` on each rank, which gets a communicator in host memory. It may make tiles small."""

    def run(joined: Joined) -> Result:
        comm = zcomm.Communicator(joined)
        try:
            return body(comm)
        finally:
            comm.close()

    with sizes.restored():
        return thread_world(world_size, folder, run)
