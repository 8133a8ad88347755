"""Environment variables of a rank, and the private directory that the job meets in.

Invariant: variables that the user has set (OMP_NUM_THREADS, PYTHONUNBUFFERED) are kept.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

ADDRESS = "127.0.0.1"


def free_port() -> int:
    """Return a TCP port on 127.0.0.1 that was free just now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((ADDRESS, 0))
        port: int = probe.getsockname()[1]
        return port


def core_count() -> int:
    """Return the number of cores that this process may run on.

    A container or taskset may leave fewer than the machine has.
    """
    return len(os.sched_getaffinity(0))


def error_file(private: Path, rank: int) -> Path:
    """Return the file where a rank may write why it ends, for the launcher's report.

    Content: {"error": type name, "message": text}.
    """
    return private / f"error{rank}.json"


def rank_environment(
    base: Mapping[str, str], extra: Mapping[str, str], rank: int, world_size: int, port: int, private: Path
) -> dict[str, str]:
    """Return the environment of one rank: `base` with `extra` over it and the launcher's own variables over both."""
    environment = {**base, **extra}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, core_count() // world_size)))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # lines arrive when they are written
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
        ZCOMM_INIT_METHOD=f"file://{private}/store",
        ZCOMM_JOB_ID=f"zcomm run {private}",
        ZCOMM_ERROR_FILE=str(error_file(private, rank)),
    )
    return environment
