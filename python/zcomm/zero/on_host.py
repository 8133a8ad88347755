"""What of a model on a device is in host memory in this version, or goes by way of it; what cannot be yet says so."""

from __future__ import annotations

import torch

from zcomm._lane import DeviceLane
from zcomm.comm import Communicator
from zcomm.zero.options import Offload
from zcomm.zero.sections import Sections


def check_host(job: Communicator) -> None:
    """Raises: NotImplementedError for a communicator that cannot move host memory."""
    if job._device != "cpu":
        raise NotImplementedError(
            f"ZeroOptimizer reduces gradients in host memory, but backend {job.backend!r} moves tensors on "
            f"{job._device} only; use zcomm.init(backend='auto'), or give comm= another communicator"
        )


def check_tiers(sections: Sections, offload: Offload, lane: DeviceLane, stage: int) -> None:
    """Raises: NotImplementedError for state, or sharded parameters, that are to stay on the device."""
    what = ""
    if offload.optimizer == "cpu" and offload.fraction < 1.0:
        what = f"fraction={offload.fraction} of the optimizer state"
    names = dict(zip(map(id, sections.params), sections.names, strict=True))
    for section in sections.list:
        first = names[id(section.params[0])]
        if section.trained and section.state == "device":
            what = what or f"the optimizer state of {first}"
        if stage == 3 and section.weights == "device":
            what = what or f"the shards of {first}"
    if what:
        raise NotImplementedError(
            f"{what} would stay on {lane.core.name}, where this version keeps neither optimizer state nor shards; use "
            "offload='cpu' or 'nvme' (zcomm.Offload(optimizer=, and in stage 3 params=) without fraction)"
        )


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int, name: str) -> None:
    """Broadcast a contiguous tensor of any device. Collective."""
    if tensor.is_cpu:
        comm.broadcast(tensor, root=root, name=name)
        return
    host = tensor.cpu()
    comm.broadcast(host, root=root, name=name)
    tensor.copy_(host)
