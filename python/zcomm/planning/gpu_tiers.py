"""Needs of a stage and an offload on a machine with GPUs: bytes by tier, seconds per step, tokens that hide them.

[Note: tiers with a GPU] Each rank has a device copy of all data that its stage does not shard (D4 shares memory on CPUs
only). If the optimizer's state is offloaded, host memory also holds the weights and the fp32 sums of gradients. The CPU
steps, gradients leave the GPU by buckets during backward, weights return. Without offload, one rank or GPUs that reach
each other need no host memory. GPUs that do not reach each other reduce on the host. Their state remains on the GPU,
and its step reads sums and weights from the host. Shards of stage 3 are then on the host, too.
Bytes are ZeRO's formula: slots, staging and padding add some hundred MiB. Seconds are of all ranks, which share the
host's memory, the PCIe link of their GPU and the drive. They exclude transfers between GPUs. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zcomm.machine.gpu_specs import PAYLOAD
from zcomm.planning.estimate import ARRAYS
from zcomm.planning.step_time import swap_seconds
from zcomm.zero.memory import memory_formula
from zcomm.zero.options import as_offload, as_precision, shares_weights

CONTEXT_NBYTES = 640 << 20  # of a process on a GPU: driver, torch's kernels and workspaces
MFU = 0.4  # of the peak, to plan with


@dataclass(frozen=True)
class GpuHost:
    """Capacities in bytes; rates in bytes (flops: operations) per second, None if unknown.

    count: GPUs, all alike. flops: the peak of one. pcie_bps: the line of one GPU, one direction. memory_bps: host
    memory, reads and writes together. drive_bps: read, written. reach: the GPUs read each other's memory.
    """

    count: int
    gpu_nbytes: int
    host_nbytes: int
    drive_nbytes: int
    flops: float | None = None
    pcie_bps: float | None = None
    memory_bps: float | None = None
    drive_bps: tuple[float, float] | None = None
    reach: bool = True


@dataclass(frozen=True)
class GpuCase:
    """One case on a host with GPUs.

    gpu_nbytes: of the fullest GPU; host and drive: of all ranks. Seconds per optimizer step as if nothing hid them;
    None if a rate is unknown. hiding_tokens: tokens of a step, over all ranks, from which the GPUs compute longer than
    the longest of these times. (They compute at MFU of the peak.) lacks: memories that are too small.
    """

    stage: int
    offload: str
    world_size: int
    gpu_nbytes: int
    host_nbytes: int
    drive_nbytes: int
    pcie_s: float | None
    update_s: float | None
    sums_s: float | None
    swap_s: float | None
    hiding_tokens: float | None
    lacks: tuple[str, ...]


def gpu_case(
    numel: int,
    stage: int,
    offload: str,
    world_size: int,
    host: GpuHost,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    accumulation: int = 1,
    activations_nbytes: int = 0,
) -> GpuCase:
    """Compute one case. activations_nbytes: of a rank's micro-batch. Raises: ValueError for an unknown option."""
    if optimizer not in ARRAYS:
        raise ValueError(f"optimizer={optimizer!r}; known here: {', '.join(ARRAYS)}")
    where, form = as_offload(offload, stage), as_precision(precision)
    apart = min(world_size, host.count) > 1 and not host.reach
    if stage == 3 and apart:
        where = replace(where, params=where.params or "cpu")
    array_nbytes = 1 if optimizer.endswith("-8bit") else 4
    memory = memory_formula(
        numel, world_size, stage, precision, where, False, state_arrays=ARRAYS[optimizer], array_nbytes=array_nbytes
    )
    sharers = world_size if shares_weights(stage, True) else 1  # of a copy of the weights on the host
    by_host = where.optimizer is not None or where.params is not None or apart
    if by_host:
        memory["cpu"]["gradients"] += memory["device"]["gradients"]
        memory["device"]["gradients"] = 0
        if where.params is None:
            memory["cpu"]["parameters"] += -(-numel // sharers) * form.param_nbytes
    tiers = {tier: sum(found.values()) for tier, found in memory.items()}
    beside = -(-world_size // host.count)
    on_gpu = beside * (tiers["device"] + activations_nbytes + CONTEXT_NBYTES)
    on_host, on_drive = world_size * tiers["cpu"], world_size * tiers["nvme"]
    lacks = tuple(
        name
        for name, needs, has in (
            ("GPU", on_gpu, host.gpu_nbytes),
            ("host", on_host, host.host_nbytes),
            ("drive", on_drive, host.drive_nbytes),
        )
        if needs > has
    )
    # Gradients go down each micro-step, weights up each step. Offloaded parameters go up for forward and backward of
    # each micro-step: of the whole model, on each rank. For a step on the GPU the rank's share of sums and weights goes
    # up, too, and of weights down. Both directions at once.
    item = form.dtype.itemsize
    share = 0.0 if where.optimizer is not None else 1 / world_size
    down = (accumulation + share) * item
    up = (2 * accumulation if where.params is not None else 1) * item + share * (4 + item)
    line = None if host.pcie_bps is None else PAYLOAD * host.pcie_bps
    pcie = _seconds(beside * max(down, up) * numel if by_host else 0, line)
    # The pass over state, weight, sum and norm. For one rank and one micro-step the GPU computes the norm's squares.
    state_nbytes = ARRAYS[optimizer] * array_nbytes + form.master_nbytes
    normed = world_size > 1 or accumulation > 1
    per_param = 2 * state_nbytes + 2 * item + 4 + 4 * normed
    update = _seconds(per_param * numel if where.optimizer is not None else 0, host.memory_bps)
    # Gradients of each micro-step go into host slots, out of them, and into the fp32 sum, which the first only writes.
    # Private copies of the weights (stage 0) are gathered: each rank reads and writes the other ranks' parts.
    summed = accumulation * (2 * item * world_size + 8) - 4 + 2 * item * (world_size // sharers - 1)
    sums = _seconds(summed * numel if by_host else 0, host.memory_bps)
    by_cpu = None if update is None or sums is None else update + sums
    # State and parameters once each way, offloaded parameters for each gather.
    state, params = memory["nvme"]["optimizer"], memory["nvme"]["parameters"]
    swap = swap_seconds(world_size, state + params * (1 + 2 * accumulation), state + params, host.drive_bps)
    return GpuCase(
        stage,
        offload,
        world_size,
        on_gpu,
        on_host,
        on_drive,
        pcie,
        update,
        sums,
        swap,
        _hiding_tokens(numel, world_size, host, pcie, by_cpu, swap),
        lacks,
    )


def _seconds(nbytes: float, bps: float | None) -> float | None:
    if not nbytes:
        return 0.0
    return None if bps is None else nbytes / bps


def _hiding_tokens(numel: int, world_size: int, host: GpuHost, *seconds: float | None) -> float | None:
    """Return the tokens that hide the longest of ``seconds``, at 6 FLOP per parameter and token.

    For one GPU and only the CPU's pass: bytes per parameter x FLOP/s / (6 x bytes/s of host memory).
    Source: arithmetic intensity, as ZeRO-Offload (arXiv:2101.06840) weighs it.
    """
    known = [each for each in seconds if each is not None]
    if host.flops is None or len(known) < len(seconds):
        return None
    return max(known) * MFU * host.flops * min(world_size, host.count) / (6.0 * numel)
