"""The process's membership in its job: one default communicator, created by init, freed by shutdown."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
import threading
from collections.abc import Callable

import torch

from zcomm import _core
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.auth import page_job
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import AUTO_ON_CUDA, CUDA_BACKENDS, JOINERS, OWN_BACKENDS, Joined
from zcomm.comm.communicator import Communicator, close_all
from zcomm.watch import rank as watch
from zcomm.watch.folder import check_variable

_lock = threading.RLock()  # a signal's handler may call shutdown() within init()
_joining: _core.Stop | None = None
_current: Communicator | None = None
_generation = 0


def init(
    backend: str = "auto",
    timeout: float | None = None,
    device: str | torch.device | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
) -> Communicator:
    """Join the job and return its communicator; a second call returns the same one.

    backend: "auto", "shm", "tcp", "hierarchical", "mpi". "auto" is shared memory on one host, hierarchical between
    hosts that have equally many ranks, else tcp. Under an mpirun of several hosts it is mpi, if mpi4py is installed.
    For CUDA tensors "cuda_ipc" (the ranks of one host) and "nccl". "auto" with device="cuda" selects cuda_ipc on one
    host if its devices reach each other (or if all ranks share one device), else nccl. "zcomm", the name among
    torch.distributed's backends, is "auto". ``Communicator.backend`` is the chosen backend, and rank 0 logs it once
    (logger "zcomm", INFO).
    timeout: seconds, at most 1e9: the deadline of joining and of every later operation. None: DEEPSPEED_TIMEOUT
    minutes. Without that variable 10 minutes; an operation waits for up to 30 minutes while the late ranks are alive.
    device: of all tensors: "cpu", "cuda" (a host's devices are dealt out by local rank) or "cuda:1". None: the CPU, or
    with a CUDA backend "cuda".
    rank, world_size, init_method ("tcp://host:port" | "file://path"): given together, or taken from torchrun, mpirun,
    Slurm or ``zcomm run``, or from torch.distributed's default group. With none of them, a world of one.

    Raises: ValueError (arguments, environment variables, a backend that does not reach all ranks). NotImplementedError
    (a missing backend or device). TimeoutError naming the ranks that did not come. PeerLost, OSError.
    RuntimeError if a rank came twice, or if ``shutdown`` was called meanwhile (by a signal handler, say).
    """
    global _current, _generation, _joining
    backend = "auto" if backend == "zcomm" else backend
    join = _joiner(backend, None if device is None else torch.device(device))
    deadlines = Deadlines.of(timeout)
    with _lock:
        if _current is not None:
            return _current
        if _joining is not None:
            raise RuntimeError("init: this thread is in the middle of init(); a signal's handler cannot call it again")
        job = rendezvous.find_job(rank, world_size, init_method)
        if backend == "auto" and not _is_cuda(device) and importlib.import_module(JOINERS["mpi"]).suits(job):
            join = _joiner("mpi", None)
        check_variable()
        _generation += 1
        stop = _joining = _core.Stop("init: zcomm.shutdown() was called while this rank was joining the job")
        try:
            with stop:
                joined = join(job, deadlines, _generation)
            comm = _current = Communicator(joined)
        finally:
            _joining = None
        if stop.is_set:
            shutdown()
            with stop:
                _core.check_stop()
        _core.set_threads(max(1, len(os.sched_getaffinity(0)) // comm.local_world_size))
        watch.open_page(page_job(joined.key), comm.rank, comm.world_size, comm.local_rank, comm.backend)
        if comm.rank == 0:
            logging.getLogger("zcomm").info("%s", comm.describe())
        return comm


def _is_cuda(device: str | torch.device | None) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _joiner(backend: str, device: torch.device | None) -> Callable[[rendezvous.Job, Deadlines, int], Joined]:
    """Return the function that joins a job by ``backend``. Raises: ValueError, NotImplementedError."""
    if backend not in (*OWN_BACKENDS, *JOINERS):
        raise ValueError(f"init: backend={backend!r} is not one of {', '.join((*OWN_BACKENDS, *JOINERS))}")
    if device is not None and device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"init: device='{device}'; collectives run on cpu and cuda")
    on_cuda = _is_cuda(device)
    if on_cuda and backend not in ("auto", *CUDA_BACKENDS):
        raise ValueError(
            f"init: backend={backend!r} moves CPU tensors; device='{device}' needs {' or '.join(CUDA_BACKENDS)}"
        )
    if device is not None and not on_cuda and backend in CUDA_BACKENDS:
        raise ValueError(f"init: backend={backend!r} moves CUDA tensors, not those of device='{device}'")
    if backend in OWN_BACKENDS and not on_cuda:
        return lambda job, deadlines, generation: rendezvous.join(job, backend, deadlines, generation)
    try:
        module = importlib.import_module(AUTO_ON_CUDA if backend == "auto" else JOINERS[backend])
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"init: backend={backend!r} is not available (no module {error.name}); use 'auto'"
        ) from None
    join: Callable[..., Joined] = module.join
    return functools.partial(join, device=device) if on_cuda else join


def shutdown() -> None:
    """Leave the job: end pending operations, say goodbye to the peers, free all memory. Idempotent.

    It also closes all communicators split from the default one. A signal handler may call it: the interrupted call,
    init() included, then raises RuntimeError.
    """
    global _current
    if (joining := _joining) is not None:
        joining.set()
    with _lock:
        watch.close_page()
        if _current is not None:
            close_all()
            _current = None


def current() -> Communicator:
    """Return the default communicator. Raises: RuntimeError before init()."""
    if _current is None:
        raise RuntimeError("zcomm.init() has not been called in this process")
    return _current


def of_several() -> Communicator | None:
    """Return the communicator of a job of several ranks, joining it if necessary. None: one rank.

    Raises: as ``init``.
    """
    if _current is None and rendezvous.find_job(None, None, None).world_size == 1:
        return None
    comm = init()
    return comm if comm.world_size > 1 else None


def is_initialized() -> bool:
    """Return True if init() was called and shutdown() was not."""
    return _current is not None


def _begin_anew() -> None:
    """Reset the state of a forked child, because another thread of the parent may have held the lock in init()."""
    global _lock, _joining
    _lock, _joining = threading.RLock(), None


atexit.register(shutdown)
os.register_at_fork(after_in_child=_begin_anew)
