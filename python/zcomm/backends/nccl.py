"""backend="nccl": CUDA tensors by NCCL, which is loaded at run time from the wheel that torch installs.

The ranks first join on the host (shared memory, TCP or both, as "auto" chooses). That communicator carries NCCL's
unique id and barriers; a part of it with the same ranks is the guard's, which compares calls behind them. An operation
runs after the work already queued on torch's current stream. reduce_scatter has the CPU's bits up to 32 ranks; else
NCCL sums in its own order. No call waits for another rank or a device on the host; ``verify()`` does.
Tensors must be on this rank's device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from zcomm import _core
from zcomm.backends.devices import give_up, index_of, joined_over, require
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined
from zcomm.bootstrap.rendezvous import Job
from zcomm.comm.communicator import Communicator
from zcomm.comm.split import split


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


def over(control: Joined, device: int) -> Joined:
    """Open NCCL over the ranks of ``control``, which nothing else may use afterwards. Collective."""
    guard: Joined | None = None
    try:
        guard = split(Communicator(control), control, 0, control.core.rank, "guard of nccl")
        assert guard is not None
        core = _core.make_nccl_communicator(
            control.core,
            guard.core,
            control.meshes[-1],
            device,
            library_path(),
            timeout_s=control.deadlines.limit_s,
        )
    except BaseException:
        give_up(control)
        if guard is not None:
            give_up(guard)
        raise
    both = replace(control, meshes=(*guard.meshes, *control.meshes))  # the last is the one that shows losses
    return joined_over(both, core, "nccl", f"cuda:{device}", lambda part: over(part, device))
