"""Ranks of this host that measure something together: how `zcomm doctor --calibrate` starts them, and their main."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm import Communicator


def run_ranks(module: str, world_size: int, threads: int, timeout_s: float) -> str:
    """Start ``python -m module FILE`` as ranks on this host; return what rank 0 wrote into FILE.

    Raises: RuntimeError.
    """
    with tempfile.TemporaryDirectory(prefix="zcomm-calibrate-") as folder:
        file = Path(folder) / "answer"
        ranks = []
        for rank in range(world_size):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "ZCOMM_INIT_METHOD": f"file://{folder}/store",
                "OMP_NUM_THREADS": str(threads),
            }
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
