"""Placement: which buckets are staged through host memory and which stay on the device."""

from __future__ import annotations

import logging
import os

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import DTYPES
from zcomm.memory.device_streams import NO_PEERS, DeviceLane, Lane, Peers
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.sections import Sections
from zcomm.zero.options import Offload

logger = logging.getLogger("zcomm")


def check_host(job: Communicator) -> None:
    """Raise NotImplementedError for a communicator that cannot move host memory."""
    if job._device != "cpu":
        raise NotImplementedError(
            f"ZeroOptimizer reduces gradients in host memory, but backend {job.backend!r} moves tensors on "
            f"{job._device} only; use zcomm.init(backend='auto'), or give comm= another communicator"
        )


def update_threads(job: Communicator) -> int:
    """Return the threads of an update on the host, for a model on a device: all of this rank's cores but two.

    These are for the thread that issues kernels, and for the communicator's. At least one thread updates.
    """
    cores = len(os.sched_getaffinity(0)) // int(job.local_world_size)
    return max(1, min(_core.threads(), cores - 2))


def reach(
    wanted: frozenset[int], shards: bool, comm: Communicator, lane: Lane, copies: str
) -> tuple[frozenset[int], Peers]:
    """Choose which of the ``wanted`` buckets stay on devices, and the communicator that joins their devices.

    shards: parameters' shards are to stay on devices, too. copies: the mesh, if its sums have several hops: then no
    bucket stays. Collective.
    """
    if not isinstance(lane, DeviceLane) or comm.world_size == 1 or not (wanted or shards):
        return (wanted if lane.on_device else frozenset()), NO_PEERS
    if copies:
        if comm.rank == 0:
            logger.warning("mesh=%s: gradients and weights pass through host memory", copies)
        return frozenset(), NO_PEERS
    peers = lane.reach(comm)
    if peers is not None:
        lane.lost = peers._lost
        return wanted, peers
    if shards and comm.rank == 0:
        logger.warning(
            "stage 3: shards that are not offloaded are in host memory, for %s and the devices of the other ranks do "
            "not reach each other (several hosts, no peer access, or ranks that do not share memory), nor does NCCL",
            lane.core.name,
        )
    return frozenset(), NO_PEERS


def state_tiers(sections: Sections, geometry: Geometry, offload: Offload, on_device: bool) -> list[str]:
    """Return the tier of each trained bucket.

    With a device, ``fraction`` of tier "cpu" counts whole buckets: the first ones that fit into the rest stay on the
    device. Their gradients arrive last, and their weights are needed first.
    """
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


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int, name: str) -> None:
    """Broadcast a contiguous tensor of any device and dtype, or a conjugated or negated view. Collective."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    octets = host
    if host.dtype not in DTYPES:  # the core moves its bytes
        octets, name = host.reshape(-1).view(torch.uint8), f"{name}, {host.dtype}"
    comm.broadcast(octets, root=root, name=name)
    if host.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(host)
