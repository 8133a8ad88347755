"""Common part of the backends of CUDA tensors: a rank's device, and the choice of "auto" for device="cuda"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from zcomm import _core
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined, Splittable
from zcomm.bootstrap.rendezvous import Job
from zcomm.comm.communicator import Communicator
from zcomm.comm.split import places_text, split


def require(backend: str, more: str = "") -> None:
    """Check that there is a device, and CUDA in the build.

    Raises: NotImplementedError in a build without CUDA, CudaError without a driver or device.
    """
    if not _core.cuda_available() and _core.cuda_info().startswith("built without"):
        raise NotImplementedError(
            f"init: backend={backend!r} needs a CUDA device, a torch and a zcomm with CUDA: {more}zcomm is "
            f"{_core.cuda_info()}, torch sees {torch.cuda.device_count()} devices; use 'auto' for CPU tensors"
        )
    if not _core.cuda_available() or not torch.cuda.is_available():
        seen = "zcomm finds one, but torch" if _core.cuda_available() else "zcomm finds none, and torch"
        raise _core.CudaError(
            f"no CUDA device: init(backend={backend!r}): {more}zcomm is {_core.cuda_info()}; {seen} sees "
            f"{torch.cuda.device_count()} (torch {torch.__version__}); use backend='auto' for CPU tensors, or see "
            "`zcomm doctor`"
        )


def index_of(device: torch.device | None, local_rank: int) -> int:
    """Return the requested device's index, else devices are dealt out by local rank. Raises: ValueError."""
    count = torch.cuda.device_count()
    if device is None or device.index is None:
        return local_rank % count
    if device.index >= count:
        raise ValueError(f"init: device='{device}' is not one of {count} CUDA devices")
    return device.index


def uuids(host: Communicator, index: int) -> list[bytes]:
    """Return the device of each rank of ``host``; this rank's is number ``index``. Collective."""
    own = torch.tensor(list(bytes.fromhex(_core.cuda_uuids()[index])), dtype=torch.uint8)
    theirs = torch.empty(host.world_size * own.numel(), dtype=torch.uint8)
    host.all_gather(own, out=theirs, name="devices")
    return [bytes(uuid.tolist()) for uuid in theirs.split(own.numel())]


def reaches_all(host: Communicator, index: int) -> bool:
    """Return True if this rank's device, number ``index``, reaches every device of ``host``'s ranks. Collective.

    A device that this process does not see (CUDA_VISIBLE_DEVICES) counts as out of reach.
    """
    seen = [bytes.fromhex(uuid) for uuid in _core.cuda_uuids()]  # processes may number them differently
    return all(
        other == seen[index] or (other in seen and torch.cuda.can_device_access_peer(index, seen.index(other)))
        for other in uuids(host, index)
    )


def joined_over(
    control: Joined,
    core: _core.Communicator,
    backend: str,
    device: str,
    over: Callable[[Joined, _core.NcclPart | None], Joined],
) -> Joined:
    """Put ``core`` over the ranks of ``control``, which then only splits them and carries messages for it.

    over: opens the same backend over the control of a part. Its second argument is the part of NCCL's own communicator,
        if ``core`` has one that can be split.
    """
    host = Communicator(control)
    if control.places:
        core.describe(f" [{places_text(control.places)}]", list(control.places))

    def splitter(_: Splittable, __: Joined, color: int | None, key: int, name: str) -> Joined | None:
        natives: list[_core.NcclPart | None] = []

        def split_devices(ranks: Sequence[int]) -> None:
            place = (ranks[0], ranks.index(core.rank)) if ranks else (-1, 0)
            natives.append(core.split_devices(*place)[1])

        part = split(host, control, color, key, name, split_devices)
        return None if part is None else over(part, natives[0])

    return replace(
        control,
        core=core,
        backend=backend,
        requested=backend,
        device=device,
        messenger=control.core,
        host=control,
        splitter=splitter,
    )


def beside(job: Communicator, core_device: _core.Device, device: torch.device) -> Communicator | None:
    """Open a communicator between the devices of the ranks of ``job`` (host memory), with its own order. Collective.

    It is cuda_ipc if all devices reach each other, else NCCL. Returns: None on all ranks if neither can; rank 0 logs
    why. Raises: as ``job``'s operations.
    """
    from zcomm.backends import cuda_ipc, nccl

    return cuda_ipc.beside(job, core_device, device) or nccl.beside(job, device)


def give_up(control: Joined) -> None:
    """Close a control of ranks that could not become a communicator."""
    control.core.close()
    for mesh in control.meshes:
        mesh.leave()


def join(job: Job, deadlines: Deadlines, generation: int, device: torch.device | None = None) -> Joined:
    """Join by backend="auto" with device="cuda". Collective.

    It chooses cuda_ipc if all ranks reach each other's device, else nccl.

    Raises: as the backends' own join.
    """
    require("auto")
    return choose(rendezvous.join(job, "auto", deadlines, generation), device)


def choose(control: Joined, device: torch.device | None) -> Joined:
    """Open the backend for CUDA tensors over ``control``, which nothing else may use afterwards. Collective."""
    from zcomm.backends import cuda_ipc, nccl

    host = Communicator(control)
    try:
        index = index_of(device, host.local_rank)
        one_host = reaches_all(host, index) and control.hosts.count == 1
        can = torch.tensor([one_host, bool(nccl.is_there())], dtype=torch.int32)
        host.all_reduce(can, "min", name="backends")
        if can[0]:
            return cuda_ipc.over(control, _core.cuda_device(index), f"cuda:{index}")
        if can[1]:
            return nccl.over(control, index)
        raise NotImplementedError(
            f"init: device='cuda': the ranks' devices do not reach each other ({control.hosts.describe()}; no peer "
            "access from some), and libnccl is not there on each; install nvidia-nccl or set ZCOMM_NCCL_LIB"
        )
    except BaseException:
        host.close()
        raise
