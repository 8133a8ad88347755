"""Elastic jobs: torchrun starts the ranks of each node, and restarts them when nodes join or leave."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from zcomm.launch.environment import ADDRESS, bracketed
from zcomm.launch.job import Job

_MOST_RESTARTS = 100  # as DeepSpeed's
_OF_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_JOBS = ("ZCOMM_INIT_METHOD", "ZCOMM_JOB_ID")  # torchrun's ranks meet at its store, under its name


def command(job: Job, port: int) -> list[str]:
    """Return the command line of torchrun on this node. port: where the nodes of a job on one host meet."""
    assert job.elastic is not None
    place = job.place
    address, port, name = (place.address, place.port, place.job_id) if place else (ADDRESS, port, "zcomm")
    is_first = place is None or place.node == 0
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        f"--nnodes={job.elastic[0]}:{job.elastic[1]}",
        f"--nproc-per-node={len(job.ranks)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={bracketed(address)}:{port}",
        f"--rdzv-conf=is_host={int(is_first)}",  # torchrun would compare names, which may not resolve on this node
        f"--local-addr={address if place is None or is_first else place.host}",
        f"--rdzv-id={job.environment.get('ELASTIC_RUN_ID', name).replace(' ', '-')}",
        f"--max-restarts={_MOST_RESTARTS}",
        "--no-python",
        *job.argv,
    ]


def environment(base: Mapping[str, str], words: Path) -> dict[str, str]:
    """Return the environment of torchrun, which sets its ranks' environments. words: file of their last words."""
    kept = {name: value for name, value in base.items() if name not in (*_OF_RANKS, *_OF_JOBS)}
    return {**kept, "PYTHONUNBUFFERED": "1", "ZCOMM_ERROR_FILE": str(words)}
