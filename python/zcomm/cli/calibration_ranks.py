"""Ranks of this host that measure something together: how `zcomm doctor --calibrate` starts them, and their main."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zcomm.launch.environment import free_port, rank_environment

if TYPE_CHECKING:
    from zcomm import Communicator

Work = Callable[[], object]


def run_ranks(module: str, world_size: int, threads: int, timeout_s: float) -> str:
    """Start ``python -m module FILE`` as ranks on this host; return the text that rank 0 wrote into FILE.

    Raises: RuntimeError.
    """
    with tempfile.TemporaryDirectory(prefix="zcomm-calibrate-") as folder:
        file = Path(folder) / "answer"
        ranks, port = [], free_port()
        for rank in range(world_size):
            own = {"OMP_NUM_THREADS": str(threads)}
            env = rank_environment(os.environ, own, rank, world_size, port, Path(folder))
            command = [sys.executable, "-m", module, str(file)]
            ranks.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
        deadline = time.monotonic() + timeout_s
        try:
            for process in ranks:
                _, words = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                if process.returncode != 0:
                    raise RuntimeError(f"calibration with {world_size} ranks failed: {words.strip()[-500:]}")
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"calibration with {world_size} ranks took more than {timeout_s:g} s") from None
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return file.read_text()


def answer(measure: Callable[[Communicator], Any]) -> None:
    """Run such a module as main: every rank measures; rank 0 writes its result, a dataclass, into FILE."""
    import torch

    import zcomm

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    job = zcomm.init()
    row = measure(job)
    if job.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(asdict(row)))
    job.barrier()
    zcomm.shutdown()


def medians(job: Communicator, works: Sequence[Work], rounds: int, calls: int = 1) -> list[float]:
    """Return the seconds of a call of each work: the median of its rounds, of the slowest rank. Collective.

    Works take turns, A B C A B C ..., so that a change of the machine's speed affects all of them. The first round does
    not count.
    """
    import torch

    taken: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 1):
        for times, work in zip(taken, works, strict=True):
            job.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            if number:
                times.append((time.perf_counter() - begin) / calls)
    slowest = torch.tensor([statistics.median(times) for times in taken], dtype=torch.float64)
    job.all_reduce(slowest, "max")
    return [float(value) for value in slowest]
