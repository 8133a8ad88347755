"""The process's membership in its job: one default communicator, made by init, freed by shutdown."""

from __future__ import annotations

import atexit
import os
import threading

import torch

from zcomm import _core, _rendezvous
from zcomm.comm import Communicator

_lock = threading.Lock()
_current: Communicator | None = None
_generation = 0


def init(
    backend: str = "auto",
    timeout: float = 60.0,
    device: str | torch.device | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> Communicator:
    """Join the job and return its communicator; a second call returns the same one.

    backend: "auto" or "shm" (ranks of one host over shared memory).
    timeout: seconds; the deadline of joining and of every later operation.
    device: None or "cpu".
    rank, world_size, init_method ("tcp://host:port" | "file://path"): given together, or taken from torchrun, mpirun,
    Slurm or ``zcomm run``; with none of them, a world of one.

    Raises: ValueError (arguments), NotImplementedError (another backend or device), TimeoutError naming the ranks
    that did not come.
    """
    global _current, _generation
    if backend not in ("auto", "shm"):
        known = ("tcp", "cuda_ipc", "nccl", "mpi")
        kind = NotImplementedError if backend in known else ValueError
        raise kind(f"init: backend={backend!r} is not available; use 'auto' or 'shm'")
    if device is not None and torch.device(device).type != "cpu":
        raise NotImplementedError(f"init: device={device!r}; this version's collectives run on the CPU")
    if not timeout > 0:
        raise ValueError(f"init: timeout={timeout} must be more than 0 seconds")
    with _lock:
        if _current is not None:
            return _current
        job = _rendezvous.find_job(rank, world_size, init_method)
        mesh = _rendezvous.connect(job, timeout, _generation)
        _generation += 1
        core = _core.Communicator.create(mesh, timeout_s=timeout)
        _core.set_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
        _current = Communicator(core, mesh, job.local_rank)
        return _current


def shutdown() -> None:
    """Leave the job: end pending operations, say goodbye to the peers, free all memory. Idempotent."""
    global _current
    with _lock:
        if _current is not None:
            _current.close()
            _current._mesh.leave()
            _current = None


def current() -> Communicator:
    """The default communicator. Raises: RuntimeError before init()."""
    if _current is None:
        raise RuntimeError("zcomm.init() has not been called in this process")
    return _current


def is_initialized() -> bool:
    """Whether init() was called and shutdown() was not."""
    return _current is not None


atexit.register(shutdown)
