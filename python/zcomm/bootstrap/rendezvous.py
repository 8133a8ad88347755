"""Rendezvous: this process's rank, the world size, and the store for the ranks' first exchange.

zcomm has no discovery of its own. Rank and world size come from the launcher (torchrun, Open MPI, MPICH, Slurm,
``zcomm run``) or the caller. The first exchange goes through torch's TCPStore or FileStore.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex

import torch.distributed as dist

from zcomm import _core
from zcomm.bootstrap import deadlines as _deadlines
from zcomm.bootstrap.auth import derive_key
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.hosts import Hosts, host_id, machine_id
from zcomm.bootstrap.join import Door, Group, Joined, Settings, enter
from zcomm.bootstrap.meeting import Meeting
from zcomm.bootstrap.tcp import descriptor_limit_named
from zcomm.machine.process import start_of, stat_of
from zcomm.watch.folder import private_folder

_ASK_S = 2.0  # for the owner of rank 0's port to answer as a store
# For jobs without a name: all ranks look for duplicate ranks for LINGER_S before init() returns. Rank 0 continues for
# _WATCH_S while the program runs.
LINGER_S, _WATCH_S = 1.0, 60.0
_served: dict[str, dist.Store] = {}  # by init_method: rank 0's, kept for ranks that join again or are duplicates


@dataclass(frozen=True)
class Job:
    """Place of this process in the job. ``init_method`` is None for a world of one."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str | None
    launcher: str
    name: str = ""  # see name_of_job


_LAUNCHERS: tuple[tuple[str, ...], ...] = (
    # launcher, rank, world size, local rank (the first variable that is set)
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_LOCAL_RANK"),  # the last is of HPE Cray's PALS
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # by mpirun_rsh
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
TORCH_DISTRIBUTED = "torch.distributed"  # an init_method: the store of its default group
_MOST_WRAPPERS = 32
_NO_RUN_ID = "none"  # torchrun's default, which many jobs share


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"environment variable {name}={env[name]!r} is not a number") from None


def _port(text: str, what: str) -> int:
    """Return the port that ``text`` names. Raises: ValueError naming the variable or argument."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= 65535):
        raise ValueError(f"{what}: expected a port, 1 to 65535")
    return int(text)


def _checked_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"init: {name}={value!r} is not an integer")
    return operator.index(value)


def find_job(
    rank: int | None, world_size: int | None, init_method: str | None, env: Mapping[str, str] = os.environ
) -> Job:
    """Find rank, world size and rendezvous: arguments, or the launcher's variables, or torch.distributed's group.

    Raises: ValueError for half-given or contradictory values, naming them.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"init: rank={rank} and world_size={world_size} must be given together")
    if rank is not None and world_size is not None:
        rank, world_size = _checked_number("rank", rank), _checked_number("world_size", world_size)
        where = init_method or env.get("ZCOMM_INIT_METHOD")
        job = Job(rank, world_size, rank, where, "arguments", name_of_job("arguments", env))
    else:
        job = _from_launcher(init_method, env)
    if job.world_size < 1 or not 0 <= job.rank < job.world_size:
        raise ValueError(f"init: rank={job.rank} does not lie in a world of size {job.world_size}")
    if job.world_size > 1 and job.init_method is None:
        raise ValueError(
            f"init: world_size={job.world_size} needs a meeting point; "
            "pass init_method='tcp://host:port' or 'file://path', or set MASTER_ADDR and MASTER_PORT"
        )
    return job


def launcher_in(env: Mapping[str, str]) -> str:
    """Return the launcher that set rank and world size in ``env``; "" if there is none."""
    return next((launcher for launcher, rank, size, *_ in _LAUNCHERS if rank in env and size in env), "")


def _from_launcher(init_method: str | None, env: Mapping[str, str]) -> Job:
    for launcher, rank_name, size_name, *local_names in _LAUNCHERS:
        if launcher == launcher_in(env):
            rank, world_size = _number(env, rank_name), _number(env, size_name)
            local_rank = next((_number(env, name) for name in local_names if name in env), rank)
            where = init_method or _meeting_point(launcher, rank_name, env)
            return Job(rank, world_size, local_rank, where, launcher, name_of_job(launcher, env))
    for _, rank_name, size_name, *_ in _LAUNCHERS[:-1]:  # Slurm sets some variables outside of steps, too
        there, lacking = (rank_name, size_name) if rank_name in env else (size_name, rank_name)
        if there in env:
            raise ValueError(
                f"init: environment variable {there}={env[there]!r} is set, but {lacking} is not; set both, or neither "
                "for a world of one"
            )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        rank = dist.get_rank()
        return Job(rank, dist.get_world_size(), rank, init_method or TORCH_DISTRIBUTED, TORCH_DISTRIBUTED)
    return Job(0, 1, 0, init_method, "none")


def name_of_job(launcher: str, env: Mapping[str, str]) -> str:
    """Return a name that all ranks of this job share and no other job has; "" if the launcher sets none."""
    if name := env.get("ZCOMM_JOB_ID"):
        return name
    if launcher == "torchrun" and env.get("TORCHELASTIC_RUN_ID", _NO_RUN_ID) != _NO_RUN_ID:
        return f"TORCHELASTIC_RUN_ID {env['TORCHELASTIC_RUN_ID']}"
    return _name_by_launcher(launcher, env)


def _name_by_launcher(launcher: str, env: Mapping[str, str]) -> str:
    """Return the name that mpirun or srun gave to the ranks that it started.

    An allocation (only SLURM_JOB_ID) is not a job, because any number of jobs run in it.
    """
    if launcher in ("Open MPI", "MPICH") and "PMIX_NAMESPACE" in env:
        return f"PMIX_NAMESPACE {env['PMIX_NAMESPACE']}"
    if launcher == "Slurm" and "SLURM_JOB_ID" in env and "SLURM_STEP_ID" in env:
        return f"SLURM_JOB_ID {env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"
    return ""


def launcher_of(rank_name: str) -> int:
    """Find the launcher's process: the nearest ancestor without ``rank_name`` (wrappers of the rank have it)."""
    pid = os.getppid()
    for _ in range(_MOST_WRAPPERS):
        try:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            parent = int(stat_of(pid)[1])
        except OSError:  # another user's
            break
        if parent == 0 or not any(each.startswith(f"{rank_name}=".encode()) for each in variables):
            break
        pid = parent
    return pid


def _meeting_point(launcher: str, rank_name: str, env: Mapping[str, str]) -> str:
    if "ZCOMM_INIT_METHOD" in env:
        return env["ZCOMM_INIT_METHOD"]
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        port = _port(env["MASTER_PORT"], f"environment variable MASTER_PORT={env['MASTER_PORT']!r}")
        return f"tcp://{env['MASTER_ADDR']}:{port}"
    if launcher == "torchrun" and ("MASTER_ADDR" in env or "MASTER_PORT" in env):
        there, lacking = ("ADDR", "PORT") if "MASTER_ADDR" in env else ("PORT", "ADDR")
        raise ValueError(
            f"init: environment variable MASTER_{there}={env[f'MASTER_{there}']!r} is set, but MASTER_{lacking} is not"
        )
    # mpirun sets no address, so use its unique job name, or else the process that started the ranks of this host.
    name = _name_by_launcher(launcher, env)
    if not name:
        parent = launcher_of(rank_name)
        name = f"{parent}-{start_of(parent)}"
    name = "".join(c if c.isalnum() else "-" for c in f"{launcher}-{name}")
    return f"file://{private_folder() / name}"


def master_of(job: Job) -> str | None:
    """Return a host that all ranks have a route to: the store's host, or MASTER_ADDR."""
    method = job.init_method or ""
    if method.startswith("tcp://"):
        return method.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return os.environ.get("MASTER_ADDR")


def open_store(job: Job, deadline: float, timeout: float) -> dist.Store:
    """Open the store that ``job.init_method`` names. Raises: ValueError for another scheme, TimeoutError, OSError."""
    method = job.init_method or ""
    if method == TORCH_DISTRIBUTED:
        store: dist.Store | None = dist.distributed_c10d._get_default_store()
        if store is None:
            raise ValueError(
                "init: torch.distributed's default group has no store; set RANK, WORLD_SIZE and MASTER_ADDR"
            )
        return store
    if method.startswith("file://"):
        # 0 workers: the last process that closes the file removes it, also after a failed init().
        return dist.FileStore(method.removeprefix("file://"), 0)
    if method.startswith("tcp://"):
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if not host:
            raise ValueError(f"init_method={method!r}: expected tcp://host:port")
        return _open_tcp_store(job, host.strip("[]"), _port(port, f"init_method={method!r}"), deadline, timeout)
    raise ValueError(f"init_method={method!r}: expected tcp://host:port or file://path")


def _open_tcp_store(job: Job, host: str, port: int, deadline: float, timeout: float) -> dist.Store:
    """Open the store in short attempts, because Ctrl-C does not interrupt one. The meeting waits for the ranks."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the port itself
    is_master = job.rank == 0 and not agent
    began, has_warned = time.monotonic(), False
    while True:
        _core.check_stop()
        left = deadline - time.monotonic()
        if not has_warned and left > 0 and time.monotonic() - began >= _deadlines.WARN_S:
            has_warned = True
            logging.getLogger("zcomm").warning(
                "init: rank %d has waited %.0f s for rank 0 to answer at %s",
                job.rank,
                _deadlines.WARN_S,
                job.init_method,
            )
        if not is_master and not _answers(host, port, min(1.0, max(0.1, left))):
            if left <= 0:
                raise _unanswered(job, timeout)
            time.sleep(0.05)
            continue
        try:
            patience_s = max(1.0, min(left, 10.0))
            if is_master:
                patience = timedelta(seconds=patience_s)
                store: dist.Store = dist.TCPStore(
                    host, port, job.world_size, True, patience, wait_for_workers=False, multi_tenant=True
                )
            else:
                store = _client(host, port, job.world_size, patience_s)
        except (dist.DistError, TimeoutError) as error:
            if is_master and "EADDRINUSE" in str(error):
                raise OSError(
                    errno.EADDRINUSE,
                    f"rank 0 cannot serve {job.init_method}: the port is in use by another program of this host",
                ) from error
            if left <= 0 or is_master:
                raise _unanswered(job, timeout, f" ({error})") from error
            continue
        store.set_timeout(timedelta(seconds=max(1.0, timeout)))
        if is_master:
            _served[job.init_method or ""] = store
        return store


def _unanswered(job: Job, timeout: float, detail: str = "") -> TimeoutError:
    return TimeoutError(
        f"init: rank {job.rank}: rank 0 does not answer at {job.init_method} within {timeout:g} s: is it running, is "
        f"MASTER_ADDR its host, is the port open?{detail}"
    )


def _client(host: str, port: int, world_size: int, timeout_s: float) -> dist.Store:
    """Connect to rank 0's store on a thread, because torch waits for a silent listener forever and ignores signals.

    Raises: TimeoutError, DistError.
    """
    made: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            timeout = timedelta(seconds=timeout_s)
            made.set_result(dist.TCPStore(host, port, world_size, False, timeout, wait_for_workers=False))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=connect, name="zcomm-store", daemon=True).start()
    until = time.monotonic() + timeout_s + 1.0
    while not made.done():
        _core.check_stop()
        if time.monotonic() > until:
            raise TimeoutError(f"the listener on {host}, port {port}, is not a store, or does not answer")
        time.sleep(0.005)
    return made.result()


def _answers(host: str, port: int, patience: float) -> bool:
    """Return True if something listens on the port."""
    try:
        socket.create_connection((host, port), patience).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return True


def join(job: Job, backend: str, deadlines: Deadlines, generation: int) -> Joined:
    """Join the job's ranks. ``generation`` counts the init() calls of this process.

    backend: one of ``_join.OWN_BACKENDS``. Raises: as join_through_store.
    """
    if job.world_size == 1:
        return join_through_store(None, 0, 1, backend, deadlines.timeout_s, deadlines)
    deadline = time.monotonic() + deadlines.timeout_s
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"zcomm/{restart}/{generation}"
    try:
        with descriptor_limit_named(f"init: rank {job.rank} cannot meet the others"):
            store = dist.PrefixStore(prefix, open_store(job, deadline, deadlines.timeout_s))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _port_taken(job, prefix, error) from error
        raise
    left = max(0.1, deadline - time.monotonic())
    where = job.init_method or ""
    linger_s = 0.0 if job.name else LINGER_S
    return join_through_store(
        store, job.rank, job.world_size, backend, left, deadlines, where, master_of(job), job.name, linger_s
    )


def _port_taken(job: Job, prefix: str, error: OSError) -> OSError:
    """Return rank 0's error for a port in use. If another rank 0 of zcomm serves it, fail its waiting ranks, too."""
    where, why = job.init_method or "", error.strerror
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    try:
        client = _client(host.strip("[]"), int(port), job.world_size, _ASK_S)
        meeting = Meeting(dist.PrefixStore(prefix, client), 0, job.world_size, time.monotonic(), where, 0.0)
        if holder := meeting.holder(0):
            meeting.refuse_twin(holder)
    except (dist.DistError, TimeoutError):  # not a store
        pass
    except RuntimeError as failure:
        why = f"{why}. {failure}"
    return OSError(errno.EADDRINUSE, f"init: {why}; give each job a MASTER_PORT of its own")


def join_through_store(
    store: dist.Store | None,
    rank: int,
    world_size: int,
    backend: str,
    join_timeout: float,
    deadlines: Deadlines | None = None,
    where: str = "the store",
    master: str | None = None,
    job: str = "",
    linger_s: float = 0.0,
    lost: Callable[[], int | None] = lambda: None,
) -> Joined:
    """Join the ranks that share ``store``. It is trusted: only they write to it, and it holds their token.

    join_timeout: of joining, in seconds. deadlines: of later operations, exactly ``join_timeout`` if None.
    where: to name the store in errors. master: a host that all have a route to. job, linger_s, lost: see ``Meeting``.
    A world of one needs no store. The keys are ``meeting_keys(world_size)``.
    Raises: TimeoutError naming the ranks that did not come. ValueError if ``backend`` does not reach all ranks, or for
    environment variables. RuntimeError with another rank's failure, or if a rank came twice. PeerLost, OSError.
    """
    deadline = time.monotonic() + join_timeout
    deadlines = deadlines or Deadlines.exactly(join_timeout)
    meeting: Meeting | None = None
    if world_size > 1:
        assert store is not None
        meeting = Meeting(store, rank, world_size, deadline, where, deadlines.timeout_s, job, lost)
    mine = {"host": host_id(), "machine": machine_id()}
    if rank == 0:
        mine |= {"token": secrets.token_hex(32), "settings": Settings.read().to_text()}
    members = [mine] if meeting is None else meeting.arrive(mine, linger_s)
    group = Group(
        what="init",
        rank=rank,
        hosts=Hosts.of([each["host"] for each in members], [each["machine"] for each in members]),
        requested=backend,
        key=derive_key(bytes.fromhex(members[0]["token"]), b"job"),
        deadlines=deadlines,
        settings=Settings.of_text(members[0]["settings"]),
    )
    door = Door(group, master)
    try:
        if meeting is None:
            return enter(group, door, [door.address], deadline)
        addresses = meeting.exchange("address", door.address)
        meeting.end()
        joined = replace(enter(group, door, addresses, deadline), processes=meeting.members)
        if linger_s > 0 and rank == 0:
            joined = replace(joined, watch=partial(meeting.watch, _WATCH_S))
        return joined
    finally:
        door.close()
