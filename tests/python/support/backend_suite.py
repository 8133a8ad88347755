"""A suite for every backend, and the jobs that run it: each check works with a communicator of any kind.

As a script it is a rank of an mpirun: `backend_suite.py FOLDER JOB`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import zcomm
from backend_calls import (
    all_to_all_mismatch,
    any_source,
    asynchronous,
    bad_arguments,
    buffers_that_share_memory,
    duplicates_keep_their_own_order,
    message_mismatch,
    messages,
    mismatches,
    rank_that_leaves,
    split,
    suspended_deadline,
)
from backend_values import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_and_scatter,
    lists,
    raises,
    reduce,
    reduce_scatter,
    rounding,
)

SUITE: list[Callable[[zcomm.Communicator], None]] = [
    *(all_reduce, rounding, lists, reduce, reduce_scatter),
    *(all_gather, broadcast, gather_and_scatter, all_to_all),
    *(asynchronous, bad_arguments, buffers_that_share_memory, messages, any_source),
    *(split, duplicates_keep_their_own_order, suspended_deadline),
    *(mismatches, all_to_all_mismatch, message_mismatch, rank_that_leaves),
]


def run_suite(backend: str, ranks_per_host: int = 0) -> list[str]:
    """Return this rank's failures. Each check has its own communicator, so a failure does not affect the others."""
    comm = _init(backend, ranks_per_host, timeout=30.0)
    failed = [failure for check in SUITE for failure in _run(check, comm)]
    try:
        comm.barrier()
    except (RuntimeError, OSError) as error:
        failed.append(f"the communicator of all: {error}")
    zcomm.shutdown()
    return failed


def _run(check: Callable[[zcomm.Communicator], None], comm: zcomm.Communicator) -> list[str]:
    try:
        own = comm.duplicate()
        check(own)
        own.close()
    except (AssertionError, RuntimeError, OSError, NotImplementedError, ValueError):
        return [f"{check.__name__}: {traceback.format_exc(limit=-3)}"]
    return []


def run_late_rank(backend: str, ranks_per_host: int = 0) -> list[str]:
    """Check that a missing rank is named at the deadline.

    The error has the waiting call; afterwards shutdown is orderly.
    """
    comm = _init(backend, ranks_per_host, timeout=2.0)
    late = comm.world_size - 1
    tensor = torch.ones(8)
    comm.all_reduce(tensor)
    raises(TimeoutError, r"recv", lambda: comm.recv(torch.empty(3), src=(comm.rank + 1) % comm.world_size, tag=3))
    comm.barrier()  # a missing message does not affect the collectives
    with comm.no_deadline():  # slow set-up by one rank
        time.sleep(3.0 if comm.rank == 0 else 0)
    comm.all_reduce(tensor)
    if comm.rank == late:
        time.sleep(4.0)
    else:
        # Within a host, a hierarchical communicator counts ranks from 0; the message names those.
        named = rf"all_reduce float32.*'loss'.*(rank {late}|ranks .*{late} of one host)"
        raises(TimeoutError, named, lambda: comm.all_reduce(tensor, name="loss"))
        raises(TimeoutError, "unusable since", lambda: comm.barrier())
    zcomm.shutdown()
    return []


def run_small_blocks(backend: str) -> list[str]:
    """Use blocks of 4 KiB: modest buffers span many, and lists cross them."""
    from zcomm.backends.mpi import messages as _mpi_messages

    comm = _init(backend, 0, timeout=30.0)
    _mpi_messages.BLOCK_NBYTES = 4096
    comm._core._block_nbytes = 4096  # for communicators split from it
    failed = []
    for check in (all_reduce, rounding, lists, reduce, reduce_scatter, all_gather, broadcast, gather_and_scatter):
        failed += _run(check, comm)
    part = comm.split(0)
    assert part._core._moves.block_nbytes == 4096
    part._core._moves.message_nbytes = 4096
    for check in (all_to_all, messages):
        check(part)
    assert part.memory()["slot_nbytes"] < 1 << 20
    zcomm.shutdown()
    return failed


def run_stopped_rank(backend: str) -> list[str]:
    """Check that the others raise at the deadline when the system has stopped a rank in the middle of an operation."""
    comm = _init(backend, 0, timeout=2.0)
    late = comm.world_size - 1
    if comm.rank == late:
        stopped_for(6.0)  # the process as a whole
    else:
        big = torch.ones(3_000_000)
        raises(TimeoutError, rf"waited 2 s for rank {late}", lambda: comm.all_reduce(big))
    time.sleep(0.1)
    zcomm.shutdown()
    return []


def stopped_for(seconds: float) -> None:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def run_serialized(backend: str) -> list[str]:
    """Use an MPI that only one thread may call at a time: operations progress only in waits, and all waits return."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    comm = _init(backend, 0, timeout=30.0)
    failed = [*_run(asynchronous, comm), *_run(messages, comm), *_run(duplicates_keep_their_own_order, comm)]
    assert not [t for t in threading.enumerate() if t.name == "zcomm-mpi"]
    zcomm.shutdown()
    return failed


def run_edges(backend: str) -> list[str]:
    """Run one job after another in the same processes: a failure does not affect the next job."""
    return [*run_late_rank(backend), *run_stopped_rank(backend), *run_small_blocks(backend)]


JOBS: dict[str, Callable[[str], list[str]]] = {"suite": run_suite, "edges": run_edges, "serialized": run_serialized}


def _init(backend: str, ranks_per_host: int, timeout: float) -> zcomm.Communicator:
    torch.set_num_threads(1)
    if ranks_per_host:
        os.environ["ZCOMM_HOST_ID"] = f"host-{int(os.environ['RANK']) // ranks_per_host}"
    comm = zcomm.init(backend, timeout=timeout)
    assert comm.backend == backend, comm.describe()
    return comm


if __name__ == "__main__":
    folder, job = Path(sys.argv[1]), sys.argv[2]
    from mpi4py import MPI

    failures = JOBS[job]("mpi")
    (folder / f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(failures))
