"""backend="cuda_ipc": CUDA tensors between the ranks of one host, by copies and kernels of zcomm's own.

Ranks have a device each, or share one. Results have the bits of the CPU backends (sums in rank order). Everything is
ordered by streams: an operation runs after the work already queued on torch's current stream. ``wait()`` makes the
current stream wait for its end. No call waits for a device on the host.
Source: docs/internals/algorithms.md, src/coll/cuda/ipc_engine.hpp.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from zcomm import _core
from zcomm.backends.devices import give_up, index_of, joined_over, reaches_all, require
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined
from zcomm.bootstrap.rendezvous import Job
from zcomm.comm.communicator import Communicator


def join(job: Job, deadlines: Deadlines, generation: int, device: torch.device | None = None) -> Joined:
    """Join the ranks of the job, each with ``device`` or else its local rank's device. Collective.

    Raises: CudaError without a driver or device, NotImplementedError in a build without CUDA, ValueError for ranks on
    several hosts.
    """
    require("cuda_ipc")
    control = rendezvous.join(job, "auto", deadlines, generation)
    try:
        if control.hosts.count > 1:
            raise ValueError(
                f"init: backend='cuda_ipc' reaches the ranks of one host, but these are {control.hosts.describe()}; "
                "use 'nccl', or 'auto' with device='cuda'"
            )
        index = index_of(device, control.hosts.local_rank(control.core.rank))
        return over(control, _core.cuda_device(index), f"cuda:{index}")
    except BaseException:
        give_up(control)
        raise


def over(control: Joined, core_device: _core.Device, device: str) -> Joined:
    """Open cuda_ipc over the ranks of ``control``, which nothing else may use afterwards. Collective.

    device: torch's name of ``core_device``; "cpu" for a simulated device (tests), which runs on the host.
    """
    core = _core.make_cuda_ipc_communicator(control.meshes[-1], core_device, **control.deadlines.as_arguments())
    joined = joined_over(control, core, "cuda_ipc", device, lambda part, _: over(part, core_device, device))
    return replace(joined, core_device=core_device)


def beside(job: Communicator, core_device: _core.Device, device: torch.device) -> Communicator | None:
    """Open cuda_ipc between the ranks of ``job`` (host memory), with its own order and failures. Collective.

    Returns: None on all ranks if they are on several hosts or a device does not reach another.
    Raises: as ``job``'s operations.
    """
    if job.backend != "shm":
        return None
    able = torch.tensor([reaches_all(job, device.index)], dtype=torch.int32)
    job.all_reduce(able, "min", name="devices that reach each other")
    if not able:
        return None
    control = job.duplicate()._joined
    own: Communicator | None = None
    try:
        own = Communicator(over(control, core_device, str(device)))
    except (RuntimeError, OSError, NotImplementedError) as error:  # a driver may still refuse access that it reported
        logging.getLogger("zcomm").warning("the ranks' devices cannot be joined (%s): by way of the host", error)
        give_up(control)
    able.fill_(own is not None)
    job.all_reduce(able, "min", name="devices that were joined")
    if not able and own is not None:
        own.close()
    return own if able else None
