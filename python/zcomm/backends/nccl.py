"""backend="nccl": CUDA tensors by NCCL, which is loaded at run time from the wheel that torch brings.

The ranks join on the host first (shared memory, TCP or both, as "auto" has it): that communicator carries NCCL's unique
id, and each operation passes its guard before NCCL starts. NCCL sums in its own order; a call waits for its end on
the host, so that a failure is found. Tensors must be on this rank's device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import torch

from zcomm import _core, _rendezvous
from zcomm._join import Joined
from zcomm._movements import Movements
from zcomm._rendezvous import Job
from zcomm._split import split
from zcomm.comm import Communicator


def library_path() -> str:
    """libnccl.so.2 of the nvidia-nccl wheel; "" where there is none (then the loader looks for it)."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return ""
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / "lib" / "libnccl.so.2").exists():
            return str(path)
    return ""


def join(job: Job, timeout: float, generation: int) -> Joined:
    """The ranks of the job, each with the CUDA device of its local rank. Collective.

    Raises: NotImplementedError without libnccl, a build with CUDA or a device; CudaError for what NCCL says.
    """
    version = _core.nccl_version(library_path())
    if not _core.cuda_available() or not torch.cuda.is_available():
        raise NotImplementedError(
            f"init: backend='nccl' needs a CUDA device, a torch and a zcomm with CUDA: NCCL {version} is there, "
            f"zcomm is {_core.cuda_info()}, torch sees {torch.cuda.device_count()} devices; use 'auto' for CPU tensors"
        )
    return _over(_rendezvous.join(job, "auto", timeout, generation))


def _over(control: Joined) -> Joined:
    """NCCL over the ranks of ``control``, which from now on serves it alone."""
    host = Communicator(control)
    device = control.hosts.local_rank(host.rank) % torch.cuda.device_count()
    try:
        core = _core.make_nccl_communicator(
            control.core, control.meshes[-1], device, library_path(), timeout_s=control.timeout_s
        )
    except BaseException:
        host.close()
        raise

    def splitter(_: Movements, joined: Joined, color: int | None, key: int, name: str) -> Joined | None:
        part = split(host, control, color, key, name)
        return None if part is None else _over(part)

    return replace(control, core=core, backend="nccl", requested="nccl", device=f"cuda:{device}", splitter=splitter)
