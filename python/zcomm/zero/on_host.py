"""What of a model on a device is in host memory, or goes by way of it, and what stays there; what cannot says so."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm._lane import DeviceLane
from zcomm._tensors import DTYPES
from zcomm.comm import Communicator
from zcomm.zero.geometry import Geometry
from zcomm.zero.options import Offload
from zcomm.zero.rules import Rule
from zcomm.zero.sections import Sections


def check_host(job: Communicator) -> None:
    """Raises: NotImplementedError for a communicator that cannot move host memory."""
    if job._device != "cpu":
        raise NotImplementedError(
            f"ZeroOptimizer reduces gradients in host memory, but backend {job.backend!r} moves tensors on "
            f"{job._device} only; use zcomm.init(backend='auto'), or give comm= another communicator"
        )


def check_shards(sections: Sections, lane: DeviceLane, stage: int) -> None:
    """Raises: NotImplementedError for sharded parameters of which only some, or without their state, are to stay on the
    device."""
    names = dict(zip(map(id, sections.params), sections.names, strict=True))
    if stage < 3 or all_stay(sections):
        return
    for section in sections.list:
        if section.weights == "device":
            raise NotImplementedError(
                f"the shards of {names[id(section.params[0])]} would stay on {lane.core.name} while others, or "
                "optimizer state, are offloaded; offload nothing, or use stage 0, 1 or 2, or "
                "zcomm.Offload(params='cpu') or 'nvme' for all parameters (offload='cpu' is both tiers)"
            )


def all_stay(sections: Sections) -> bool:
    """Whether nothing is offloaded."""
    return all((section.state, section.weights) == ("device", "device") for section in sections.list)


def no_reach(lane: DeviceLane) -> NotImplementedError:
    """Of sharded parameters that are to stay on devices which do not reach each other."""
    return NotImplementedError(
        f"stage 3 without offload keeps shards on the devices, but {lane.core.name} and those of the other ranks do "
        "not reach each other (several hosts, no peer access, or ranks that do not share memory); use stage 0, 1 or "
        "2, or offload='cpu' or 'nvme'"
    )


def state_tiers(sections: Sections, geometry: Geometry, offload: Offload, on_device: bool) -> list[str]:
    """Of each trained bucket. With a device ``fraction`` of tier "cpu" goes by bucket: as many of the first ones as fit
    into the rest stay on the device. Their gradients are the last that come, and their weights are wanted first."""
    tiers = [sections.list[bucket.section].state for bucket in geometry.buckets]
    if not on_device or offload.optimizer != "cpu":
        return tiers
    rest = round((1.0 - offload.fraction) * sum(bucket.count for bucket in geometry.buckets))
    for bucket in geometry.buckets:
        rest -= bucket.count
        if rest < 0:
            break
        tiers[bucket.index] = "device"
    return tiers


def check_rule(tiers: Sequence[str], rule: Rule, lane: DeviceLane) -> None:
    """Raises: NotImplementedError for state on the device that no kernel steps there."""
    if "device" in tiers and rule.on_device is None:
        raise NotImplementedError(
            f"optimizer {rule.name!r} has no kernel for state on {lane.core.name}; use offload='cpu' (or 'nvme', "
            "without fraction), or one that has: adamw, adam, lion"
        )


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int, name: str) -> None:
    """Broadcast a contiguous tensor of any device and dtype. Collective."""
    if tensor.dtype not in DTYPES:  # the core need not know it to move it
        tensor = tensor.reshape(-1).view(torch.uint8)
    if tensor.is_cpu:
        comm.broadcast(tensor, root=root, name=name)
        return
    host = tensor.cpu()
    comm.broadcast(host, root=root, name=name)
    tensor.copy_(host)
