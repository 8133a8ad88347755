"""Rendezvous: who am I, how many are we, and where do the ranks exchange their first bytes.

zcomm has no discovery of its own: rank and world size come from the launcher (torchrun, Open MPI, MPICH, Slurm,
``zcomm run``) or the caller, and the first exchange goes through torch's TCPStore or FileStore.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from zcomm import _core
from zcomm._hosts import Hosts, host_id, machine_id
from zcomm._join import Door, Group, Joined, Settings, enter
from zcomm._proof import derive_key
from zcomm._tcp import descriptor_limit_named

_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class Job:
    """This process's place in the job. ``init_method`` is None for a world of one."""

    rank: int
    world_size: int
    local_rank: int
    init_method: str | None
    launcher: str


_LAUNCHERS: tuple[tuple[str, str, str, str], ...] = (
    # launcher, rank, world size, local rank
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise ValueError(f"environment variable {name}={env[name]!r} is not a number") from None


def find_job(
    rank: int | None, world_size: int | None, init_method: str | None, env: Mapping[str, str] = os.environ
) -> Job:
    """Rank, world size and rendezvous from the arguments, or else from the launcher's variables.

    Raises: ValueError for half-given or contradictory values, naming them.
    """
    if (rank is None) != (world_size is None):
        raise ValueError(f"init: rank={rank} and world_size={world_size} must be given together")
    if rank is not None and world_size is not None:
        job = Job(rank, world_size, rank, init_method or env.get("ZCOMM_INIT_METHOD"), "arguments")
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


def _from_launcher(init_method: str | None, env: Mapping[str, str]) -> Job:
    for launcher, rank_name, size_name, local_name in _LAUNCHERS:
        if rank_name in env and size_name in env:
            rank, world_size = _number(env, rank_name), _number(env, size_name)
            local_rank = _number(env, local_name) if local_name in env else rank
            return Job(rank, world_size, local_rank, init_method or _meeting_point(launcher, env), launcher)
    return Job(0, 1, 0, init_method, "none")


def _meeting_point(launcher: str, env: Mapping[str, str]) -> str:
    if "ZCOMM_INIT_METHOD" in env:
        return env["ZCOMM_INIT_METHOD"]
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return f"tcp://{env['MASTER_ADDR']}:{_number(env, 'MASTER_PORT')}"
    # mpirun gives no address: the ranks of one host share their parent, and its start time makes that unique.
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    job = next((env[n] for n in ("PMIX_NAMESPACE", "SLURM_JOB_ID") if n in env), "job")
    folder = Path(tempfile.gettempdir()) / f"zcomm-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(f"{folder} must belong to this user and be closed to others (mode 0700)")
    name = "".join(c if c.isalnum() else "-" for c in f"{launcher}-{job}-{parent}-{started}")
    return f"file://{folder / name}"


def master_of(job: Job) -> str | None:
    """A host that all ranks have a route to: where the store is, or what the launcher says."""
    method = job.init_method or ""
    if method.startswith("tcp://"):
        return method.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return os.environ.get("MASTER_ADDR")


def open_store(job: Job, deadline: float, timeout: float) -> dist.Store:
    """The store that ``job.init_method`` names. Raises: ValueError for another scheme, TimeoutError, OSError."""
    method = job.init_method or ""
    if method.startswith("file://"):
        return dist.FileStore(method.removeprefix("file://"), job.world_size)
    if method.startswith("tcp://"):
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"init_method={method!r}: expected tcp://host:port")
        return _open_tcp_store(job, host.strip("[]"), int(port), deadline, timeout)
    raise ValueError(f"init_method={method!r}: expected tcp://host:port or file://path")


def _open_tcp_store(job: Job, host: str, port: int, deadline: float, timeout: float) -> dist.Store:
    """In short attempts, as Ctrl-C does not reach one; the ranks are waited for later, by name."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the port itself
    is_master = job.rank == 0 and not agent
    while True:
        left = deadline - time.monotonic()
        if not is_master and not _answers(host, port, min(1.0, max(0.1, left))):
            if left <= 0:
                raise TimeoutError(f"rank {job.rank}: no store at {job.init_method} within {timeout:g} s")
            time.sleep(0.05)
            continue
        try:
            store = dist.TCPStore(
                host,
                port,
                job.world_size,
                is_master=is_master,
                timeout=timedelta(seconds=max(1.0, min(left, 10.0))),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except dist.DistError as error:
            if left <= 0 or is_master:
                raise TimeoutError(
                    f"rank {job.rank}: no store at {job.init_method} within {timeout:g} s: {error}"
                ) from error
            continue
        store.set_timeout(timedelta(seconds=max(1.0, timeout)))
        return store


def _answers(host: str, port: int, patience: float) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((host, port), patience).close()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return False
    return True


def join(job: Job, backend: str, timeout: float, generation: int) -> Joined:
    """Joins the job's ranks. ``generation`` counts the init() calls of this process.

    backend: one of ``_join.OWN_BACKENDS``. Raises: as join_through_store.
    """
    if job.world_size == 1:
        return join_through_store(None, 0, 1, backend, timeout)
    deadline = time.monotonic() + timeout
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with descriptor_limit_named(f"init: rank {job.rank} cannot meet the others"):
        store = dist.PrefixStore(f"zcomm/{restart}/{generation}", open_store(job, deadline, timeout))
    left = max(0.1, deadline - time.monotonic())
    where = job.init_method or ""
    return join_through_store(store, job.rank, job.world_size, backend, left, timeout, where, master_of(job))


def join_through_store(
    store: dist.Store | None,
    rank: int,
    world_size: int,
    backend: str,
    join_timeout: float,
    timeout: float | None = None,
    where: str = "the store",
    master: str | None = None,
) -> Joined:
    """Joins the ranks that share ``store``, which nobody else writes to and which is trusted: their token lies in it.

    join_timeout: of joining; timeout: of later operations, the same if not given. where: the store's name, for errors.
    master: a host that all have a route to. A world of one needs no store. The keys are ``store_keys(world_size)``.
    Raises: TimeoutError naming the ranks that did not come; ValueError when ``backend`` does not reach them, or for
    environment variables; RuntimeError with what kept another rank from it; PeerLost, OSError.
    """
    deadline = time.monotonic() + join_timeout
    meeting = _Meeting(store, rank, world_size, deadline, f"{where} within {timeout or join_timeout:g} s")
    mine = {"host": host_id(), "machine": machine_id()}
    if rank == 0:
        mine |= {"token": secrets.token_hex(32), "settings": Settings.read().to_text()}
    everyone = [json.loads(told) for told in meeting.exchange("rank", json.dumps(mine))]
    group = Group(
        what="init",
        rank=rank,
        hosts=Hosts.of([each["host"] for each in everyone], [each["machine"] for each in everyone]),
        requested=backend,
        key=derive_key(bytes.fromhex(everyone[0]["token"]), b"job"),
        timeout_s=timeout or join_timeout,
        settings=Settings.of_text(everyone[0]["settings"]),
    )
    door = Door(group, master)
    try:
        addresses = meeting.exchange("address", door.address)
        meeting.end()
        return enter(group, door, addresses, deadline)
    finally:
        door.close()


def store_keys(world_size: int) -> list[str]:
    """What join_through_store leaves in the store."""
    return [f"{what}{rank}" for what in ("rank", "address") for rank in range(world_size)] + ["read"]


@dataclass(frozen=True)
class _Meeting:
    """Exchanges of texts through a store."""

    store: dist.Store | None
    rank: int
    world_size: int
    deadline: float
    where: str

    def exchange(self, what: str, mine: str) -> list[str]:
        """Everybody's text, by rank."""
        if self.store is None or self.world_size == 1:
            return [mine]
        store, names = self.store, [f"{what}{rank}" for rank in range(self.world_size)]
        try:
            store.set(names[self.rank], mine)
            if not _wait(lambda: store.check(names), self.deadline):
                missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
                told = f"rank(s) {', '.join(missing)} of {self.world_size} did not come to {self.where}"
                raise TimeoutError(f"init: {told}")
            return [told.decode() for told in store.multi_get(names)]
        except dist.DistError as error:
            lost = _core.PeerLost(f"init: rank {self.rank} lost the store, which rank 0 has: {error}")
            lost.rank = 0
            raise lost from error

    def end(self) -> None:
        """Rank 0 may have the store: if it fails now, the others shall have read why."""
        if self.store is None or self.world_size == 1:
            return
        store = self.store
        with contextlib.suppress(dist.DistError):
            store.add("read", 1)
            if self.rank == 0:
                _wait(
                    lambda: store.add("read", 0) >= self.world_size,
                    min(self.deadline, time.monotonic() + _LAST_WORDS_S),
                )


def _wait(happened: Callable[[], bool], deadline: float) -> bool:
    """Looks for it less and less often; False at the deadline."""
    pause = 0.001
    while not happened():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True
