"""Ranks that are late on purpose. They signal by files, because on a busy machine a sleep guarantees no order."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import zcomm
from zcomm.bootstrap.deadlines import WARN_S, Deadlines


def init_with_deadline(timeout_s: float, backend: str = "auto") -> zcomm.Communicator:
    """Join without a short deadline and meet; operations have ``timeout_s``. Patches a class in a rank's process."""
    times = {"timeout_s": timeout_s, "limit_s": timeout_s, "warn_s": WARN_S}
    Deadlines.as_arguments = lambda self: times  # type: ignore[method-assign,assignment,return-value]
    comm = zcomm.init(backend, timeout=100)
    meet(comm)
    return comm


def meet(comm: zcomm.Communicator) -> None:
    """Wait for all ranks, for as long as it takes."""
    with comm.no_deadline():
        comm.barrier()


def tell(folder: str, point: str) -> None:
    """Tell other ranks that this one has reached ``point``."""
    Path(folder, f"{point}-{os.environ['RANK']}").touch()


def wait_until_told(folder: str, point: str, ranks: Iterable[int]) -> None:
    """Wait until each of ``ranks`` has reached ``point``."""
    for rank in ranks:
        while not Path(folder, f"{point}-{rank}").exists():
            time.sleep(0.01)
