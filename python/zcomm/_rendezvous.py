"""Rendezvous: who am I, how many are we, and where do the ranks exchange their first bytes.

zcomm has no discovery of its own: rank and world size come from the launcher (torchrun, Open MPI, MPICH, Slurm,
``zcomm run``) or the caller, and the first exchange goes through torch's TCPStore or FileStore.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from zcomm import _core


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


def open_store(job: Job, timeout: float) -> dist.Store:
    """The store that ``job.init_method`` names. Raises: ValueError for another scheme, TimeoutError, OSError."""
    method = job.init_method or ""
    if method.startswith("file://"):
        return dist.FileStore(method.removeprefix("file://"), job.world_size)
    if method.startswith("tcp://"):
        host, _, port = method.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"init_method={method!r}: expected tcp://host:port")
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun serves the port itself
        try:
            return dist.TCPStore(
                host,
                int(port),
                job.world_size,
                is_master=job.rank == 0 and not agent,
                timeout=timedelta(seconds=timeout),
                multi_tenant=True,
            )
        except dist.DistError as error:
            raise TimeoutError(f"rank {job.rank}: no store at {method} within {timeout} s: {error}") from error
    raise ValueError(f"init_method={method!r}: expected tcp://host:port or file://path")


def host_id() -> str:
    """What ranks must share to use each other's memory: kernel boot and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def connect(job: Job, timeout: float, generation: int) -> _core.Mesh:
    """Meets all ranks and connects to them. ``generation`` counts the init() calls of this process.

    Raises: TimeoutError naming the ranks that did not come; NotImplementedError when they are on several hosts.
    """
    listener = _core.Listener()
    if job.world_size == 1:
        return _core.Mesh.connect(0, 1, listener, [listener.address], "", timeout)
    deadline = time.monotonic() + timeout
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"zcomm/{restart}/{generation}", open_store(job, timeout))
    mine = {"address": listener.address, "host": host_id(), "token": secrets.token_hex(16)}
    store.set(str(job.rank), json.dumps(mine))
    everyone = [_get(store, rank, job, deadline, timeout) for rank in range(job.world_size)]
    for rank, other in enumerate(everyone):
        if other["host"] != everyone[0]["host"]:
            raise NotImplementedError(
                f"rank 0 and rank {rank} are on different hosts (or network namespaces); this version joins one host"
            )
    addresses = [other["address"] for other in everyone]
    left = max(0.1, deadline - time.monotonic())
    return _core.Mesh.connect(job.rank, job.world_size, listener, addresses, everyone[0]["token"], left)


def _get(store: dist.Store, rank: int, job: Job, deadline: float, timeout: float) -> dict[str, str]:
    pause = 0.001
    while not store.check([str(rank)]):
        if time.monotonic() > deadline:
            missing = [r for r in range(job.world_size) if not store.check([str(r)])]
            raise TimeoutError(
                f"init: rank(s) {', '.join(map(str, missing))} of {job.world_size} did not come to "
                f"{job.init_method} within {timeout} s"
            )
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    answer: dict[str, str] = json.loads(store.get(str(rank)))
    return answer
