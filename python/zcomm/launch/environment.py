"""Environment variables of a rank, and which of them go to other nodes.

Invariant: variables that the user has set (OMP_NUM_THREADS, PYTHONUNBUFFERED) are kept.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from zcomm.launch.job import Place

ADDRESS = "127.0.0.1"
EXPORTED = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "ZCOMM")
_OF_THIS_HOST = ("ZCOMM_HOST_ID", "ZCOMM_HOST_ADDRESS", "ZCOMM_INIT_METHOD", "ZCOMM_JOB_ID", "ZCOMM_ERROR_FILE")
PAYLOAD = "ZCOMM_NODE_PAYLOAD"  # message to a node, if its launcher forwards variables
_LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MV2_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_LOCALID")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    base: Mapping[str, str],
    extra: Mapping[str, str],
    rank: int,
    world_size: int,
    port: int,
    private: Path,
    place: Place | None = None,
) -> dict[str, str]:
    """Return the environment of one rank: `base` with `extra` over it and the launcher's own variables over both.

    port: on this host. place: this node's part of the ranks, which then meet at its address; None: all of them.
    """
    local_rank, local_world_size = rank, world_size
    address, init_method, job_id = ADDRESS, f"file://{private}/store", f"zcomm run {private}"
    if place is not None:
        local_rank, local_world_size = rank - place.first_rank, place.count
        address, port, job_id = place.address, place.port, place.job_id
        init_method = f"tcp://{bracketed(address)}:{port}"
    environment = {**base, **extra}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, core_count() // local_world_size)))
    environment.setdefault("PYTHONUNBUFFERED", "1")  # lines are flushed when written
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(local_rank),
        LOCAL_WORLD_SIZE=str(local_world_size),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        ZCOMM_INIT_METHOD=init_method,
        ZCOMM_JOB_ID=job_id,
        ZCOMM_ERROR_FILE=str(error_file(private, rank)),
    )
    return environment


def bracketed(address: str) -> str:
    """Return an address as it stands before ":PORT"."""
    return f"[{address}]" if ":" in address else address


def devices_of(slots: Sequence[int], env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the CUDA_VISIBLE_DEVICES of ranks with ``slots`` on this node.

    Under Slurm the slots count the GPUs that the step was given. Raises: ValueError if there are fewer.
    """
    given = env.get("CUDA_VISIBLE_DEVICES")
    if not given or not ("SLURM_STEP_GPUS" in env or "SLURM_JOB_GPUS" in env):
        return tuple(map(str, slots))
    visible = given.split(",")
    if max(slots) >= len(visible):
        raise ValueError(f"slot {max(slots)} is not there: Slurm gave this step CUDA_VISIBLE_DEVICES={given}")
    return tuple(visible[slot] for slot in slots)


def of_launcher(name: str) -> bool:
    """Return True for a variable with a process's rank by another launcher, which zcomm's ranks must not inherit."""
    return name.startswith(_LAUNCHERS) or name in _SLURM


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``env`` to pass to ranks on other nodes: names that begin with one of EXPORTED."""
    left_out = (*_OF_THIS_HOST, PAYLOAD)
    return {name: value for name, value in env.items() if name.startswith(EXPORTED) and name not in left_out}


def read_environment_file(file: Path) -> dict[str, str]:
    """Return the variables of a file with lines NAME=VALUE (.deepspeed_env).

    Raises: ValueError with file, number and text of another line; OSError.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if not equals or not _VARIABLE.fullmatch(name.strip()):
            raise ValueError(f"{file}, line {number}: {line.strip()!r} is not NAME=VALUE")
        value = value.strip()
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        found[name.strip()] = value[1:-1] if quoted else value
    return found
