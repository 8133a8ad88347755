"""backend="mpi": the job of an mpirun, over the network of its MPI (Open MPI, MPICH and derivatives).

The import of mpi4py starts MPI, so only this backend imports it; MPI ends when the process exits. When a rank dies,
mpirun ends the whole job. Errors name a rank that closed its communicator or is late, as over shared memory.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from zcomm import _core
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.hosts import Hosts, host_id, machine_id
from zcomm.bootstrap.join import Joined, Splittable
from zcomm.bootstrap.rendezvous import Job

if TYPE_CHECKING:
    from zcomm.backends.mpi.core import MpiCore


def mpi_available() -> bool:
    """Return True if mpi4py is installed; starts nothing."""
    return importlib.util.find_spec("mpi4py") is not None


def suits(job: Job, env: Mapping[str, str] = os.environ) -> bool:
    """Return True if "auto" selects MPI: mpirun started ranks on several hosts, and mpi4py is installed."""
    local = {"Open MPI": "OMPI_COMM_WORLD_LOCAL_SIZE", "MPICH": "MPI_LOCALNRANKS"}.get(job.launcher)
    return local is not None and env.get(local, str(job.world_size)) != str(job.world_size) and mpi_available()


def join(job: Job, deadlines: Deadlines, generation: int) -> Joined:
    """Join the ranks of the mpirun that started this process. Collective.

    Raises: NotImplementedError without mpi4py or an MPI library; ValueError if another launcher started the job.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        raise NotImplementedError(
            f"init: backend='mpi' needs mpi4py and an MPI library: pip install 'zcomm[mpi]' ({error})"
        ) from error
    from zcomm.backends.mpi.core import MpiCore

    world = MPI.COMM_WORLD
    if (job.rank, job.world_size) != (world.rank, world.size):
        raise ValueError(
            f"init: backend='mpi' is for jobs of mpirun: this process is rank {job.rank} of {job.world_size} "
            f"({job.launcher}), but rank {world.rank} of {world.size} for MPI"
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE and world.rank == 0:
        logging.getLogger("zcomm").warning(
            "MPI is not THREAD_MULTIPLE: asynchronous operations move only while zcomm is called"
        )
    return _joined(MpiCore(world, deadlines), deadlines)


def _joined(core: MpiCore, deadlines: Deadlines) -> Joined:
    places = core.exchange((host_id(), machine_id(), secrets.token_bytes(32)))
    hosts = Hosts.of([host for host, _, _ in places], [machine for _, machine, _ in places])
    return Joined(
        core=cast("_core.Communicator", core),
        hosts=hosts,
        backend="mpi",
        requested="mpi",
        deadlines=deadlines,
        key=places[0][2],  # no authentication: MPI knows its ranks
        splitter=_split,
    )


def _split(parent: Splittable, joined: Joined, color: int | None, key: int, name: str) -> Joined | None:
    core = cast("MpiCore", joined.core).split(color, key, name)
    return None if core is None else _joined(core, joined.deadlines)
