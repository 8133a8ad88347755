"""The host's GPUs in ring order for the ranks of a job, so that neighbouring ranks have good links. Pure.

A program that takes GPU ``LOCAL_RANK`` gets them in this order; those that the ring does not need follow it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from zcomm.launch.errors import UserError
from zcomm.machine.gpus import Machine
from zcomm.machine.topology import EXACT, quality, ring_order

VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def gpu_ring(environment: Mapping[str, str], world_size: int, machine: Machine) -> dict[str, str]:
    """Return the variables that number the GPUs by NVML's best ring over as many as there are ranks, or over all.

    environment: what the ranks have without them. Raises: UserError where a variable is set already, where NVML does
    not tell, or a GPU is lost or cut into parts (MIG).
    """
    for name in (VISIBLE, ORDER):
        if name in environment:
            raise UserError(
                f"--gpu-ring sets {name}, which is {environment[name]!r} here: unset it, or leave the option"
            )
    if machine.absent or not machine.gpus:
        raise UserError(f"--gpu-ring: {machine.absent or 'NVML lists no GPU'}")
    for gpu in machine.gpus:
        if gpu.lost or gpu.mig:
            what = f"is lost ({gpu.lost})" if gpu.lost else "is cut into MIG devices"
            raise UserError(f"--gpu-ring: GPU {gpu.index} {what}; set {VISIBLE} yourself")
    ring = best_ring(machine, world_size)
    rest = [place for place in range(len(machine.gpus)) if place not in ring]
    indices = [str(machine.gpus[place].index) for place in (*ring, *rest)]
    return {ORDER: "PCI_BUS_ID", VISIBLE: ",".join(indices)}


def best_ring(machine: Machine, size: int) -> tuple[int, ...]:
    """Return the positions in ``machine.gpus`` of the best ring of ``size`` of them.

    Of more than EXACT GPUs the first ones are taken, and of equally good rings the first.
    """
    ranks, count = machine.ranks(), len(machine.gpus)
    size = min(size, count)
    if count > EXACT:
        return ring_order([row[:size] for row in ranks[:size]])
    rings = []
    for places in itertools.combinations(range(count), size):
        inner = ring_order([[ranks[a][b] for b in places] for a in places])
        rings.append(tuple(places[i] for i in inner))
    return max(rings, key=lambda ring: quality(ring, ranks))  # the first of equals
