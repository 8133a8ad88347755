"""backend="nccl": CUDA tensors by NCCL, which is loaded at run time from the wheel that torch installs.

The ranks first join on the host (shared memory, TCP or both, as "auto" chooses). That communicator carries NCCL's
unique id and barriers. Two more of the same ranks are the guard's, which compares calls behind them, and the messages',
which matches send and recv. An operation runs after the work already queued on torch's current stream. reduce_scatter
has the CPU's bits up to 32 ranks; else NCCL sums in its own order. No collective waits for another rank or a device on
the host; ``verify()`` does. Tensors must be on this rank's device.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zcomm import _core
from zcomm.backends.devices import give_up, index_of, joined_over, require, uuids
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined
from zcomm.bootstrap.rendezvous import Job
from zcomm.comm.communicator import Communicator
from zcomm.comm.split import split

logger = logging.getLogger("zcomm")
MOST_RANKS = 32  # of a reduce_scatter with the CPU's bits (kMaxKernelBuffers)


def library_path() -> str:
    """Find libnccl.so.2 of the nvidia-nccl wheel; "" without that wheel (then the loader looks for it)."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / "lib" / "libnccl.so.2").exists():
            return str(path)
    return ""


def is_there() -> bool:
    """Return True if libnccl can be loaded."""
    try:
        return bool(_core.nccl_version(library_path()))
    except NotImplementedError:
        return False


def join(job: Job, deadlines: Deadlines, generation: int, device: torch.device | None = None) -> Joined:
    """Join the ranks of the job, each with ``device`` or else its local rank's device. Collective.

    Raises: NotImplementedError without libnccl or a build with CUDA; CudaError without a device, or of NCCL.
    """
    version = _core.nccl_version(library_path())
    require("nccl", f"NCCL {version} is there, ")
    control = rendezvous.join(job, "auto", deadlines, generation)
    return over(control, index_of(device, control.hosts.local_rank(control.core.rank)))


# Makes the core's communicator of three communicators on the host (control, guard, messages), which watches for losses
# by the mesh. The last argument is this rank's part of a split of NCCL's own communicator; None: it joins by an id.
Maker = Callable[
    [
        _core.Communicator,
        _core.Communicator,
        "_core.Communicator | None",
        _core.Mesh,
        float,
        "_core.NcclPart | None",
    ],
    _core.Communicator,
]


def over(control: Joined, device: int, messages: bool = True) -> Joined:
    """Open NCCL over the ranks of ``control``, which nothing else may use afterwards. Collective."""

    def make(
        hosts: _core.Communicator,
        guard: _core.Communicator,
        matcher: _core.Communicator | None,
        watched: _core.Mesh,
        limit_s: float,
        native: _core.NcclPart | None,
    ) -> Any:
        path = library_path()
        return _core.make_nccl_communicator(hosts, guard, matcher, watched, device, path, limit_s, native)

    return made_by(make, control, f"cuda:{device}", messages)


def made_by(
    make: Maker, control: Joined, device: str, messages: bool = True, native: _core.NcclPart | None = None
) -> Joined:
    """Open NCCL as ``over`` does, by ``make``; its tensors are on ``device``. messages: with send and recv. native: as
    Maker's."""
    parts: list[Joined] = []
    try:
        for use in ("guard", "messages") if messages and control.core.world_size > 1 else ("guard",):
            part = split(Communicator(control), control, 0, control.core.rank, f"{use} of nccl")
            assert part is not None
            parts.append(part)
        matcher = parts[1].core if len(parts) > 1 else None
        core = make(control.core, parts[0].core, matcher, control.meshes[-1], control.deadlines.limit_s, native)
    except BaseException:
        give_up(control)
        for part in parts:
            give_up(part)
        raise
    meshes = [mesh for part in parts for mesh in part.meshes]
    both = replace(control, meshes=(*meshes, *control.meshes))  # the last is the one that shows losses

    def over_part(part: Joined, native: _core.NcclPart | None) -> Joined:
        return made_by(make, part, device, messages, native)

    return replace(joined_over(both, core, "nccl", device, over_part), messenger=None)  # the core's own


def beside(job: Communicator, device: torch.device) -> Communicator | None:
    """Open NCCL between the devices of the ranks of ``job`` (host memory), with its own order. Collective.

    Returns: None on all ranks if it cannot, or does not have the CPU's bits; rank 0 logs why. Raises: as ``job``'s
    operations.
    """
    index = 0 if device.index is None else device.index
    found = torch.tensor([is_there()], dtype=torch.int32)
    job.all_reduce(found, "min", name="libnccl")
    why = ""
    if len(set(uuids(job, index))) < job.world_size:
        why = "ranks share a device"
    elif job.world_size > MOST_RANKS:
        why = f"sums of {job.world_size} ranks have the CPU's bits up to {MOST_RANKS}"
    elif not found:
        why = "libnccl is not there on each rank"
    own: Communicator | None = None
    if not why:
        try:
            own = Communicator(over(job.duplicate()._joined, index, messages=False))
        except (RuntimeError, OSError, NotImplementedError) as error:
            logger.warning("NCCL cannot join this rank's device, %s: %s", device, error)
        found.fill_(own is not None)
        job.all_reduce(found, "min", name="devices that were joined")
        why = "" if found else "it could not join the ranks' devices"
    if why and own is not None:
        own.close()
    if why and job.rank == 0:
        logger.warning("gradients and weights pass through host memory: devices do not reach each other; NCCL: %s", why)
    return None if why else own
