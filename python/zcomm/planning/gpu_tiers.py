"""Needs of a stage and an offload on a machine with GPUs: bytes by tier, seconds per step, tokens that hide them.

[Note: tiers with a GPU] Each rank has a device copy of all data that its stage does not shard (D4 shares memory on CPUs
only). If the optimizer's state is offloaded, host memory also holds the weights and fp32 sums of the gradients. One
rank with one micro-step has the gradients themselves instead, or with update="backward" none. One rank with several has
both, if its updates add the last gradients. The CPU steps, gradients leave the GPU by buckets during backward, weights
return. Without offload, one rank or GPUs that reach each other need no host memory. GPUs that do not
reach each other reduce on the host. Their state remains on the GPU, and its step reads sums and weights from the host.
Shards of stage 3 are then on the host, too.
Bytes are ZeRO's formula: slots, staging and padding add some hundred MiB. Seconds are of all ranks, which share the
host's memory, the PCIe link of their GPU and the drive. They exclude transfers between GPUs. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from zcomm.planning.estimate import ARRAYS, moment_of_updates
from zcomm.planning.lanes import FORWARD, GpuStep, Job, Rates, gpu_step, is_single_pass, is_used_up
from zcomm.zero.memory.usage import Memory, memory_formula
from zcomm.zero.options import Offload, as_offload, as_precision, shares_weights

CONTEXT_NBYTES = 640 << 20  # of a process on a GPU: driver, torch's kernels and workspaces
MFU = 0.4  # of the peak, to plan with


@dataclass(frozen=True)
class GpuHost:
    """Capacities in bytes, and rates. count: GPUs, all alike. reach: the GPUs read each other's memory."""

    count: int
    gpu_nbytes: int
    host_nbytes: int
    drive_nbytes: int
    rates: Rates = field(default_factory=Rates)
    reach: bool = True


@dataclass(frozen=True)
class GpuCase:
    """One case on a host with GPUs.

    gpu_nbytes: of the fullest GPU; host and drive: of all ranks. step: its lanes. hiding_tokens: of a step, over all
    ranks. From so many tokens on the GPUs compute longer than the longest other lane takes; None if a rate is unknown.
    lacks: memories that are too small.
    """

    stage: int
    offload: str | Offload | None
    world_size: int
    gpu_nbytes: int
    host_nbytes: int
    drive_nbytes: int
    step: GpuStep
    hiding_tokens: float | None
    lacks: tuple[str, ...]


def gpu_case(
    numel: int,
    stage: int,
    offload: str | Offload | None,
    world_size: int,
    host: GpuHost,
    *,
    precision: str = "bf16",
    optimizer: str = "adamw",
    accumulation: int = 1,
    activations_nbytes: int = 0,
    offloaded: Mapping[str, int] | None = None,
    clips: bool = False,
    flops: float | None = None,
    forward: float = FORWARD,
    last_count: int = 0,
) -> GpuCase:
    """Compute one case.

    activations_nbytes: of a rank's micro-batch, on its GPU. offloaded: by other tiers. clips: with ``clip_norm``.
    flops: of forward and backward of a step, over all ranks; None: unknown. forward: the share of forward in it.
    last_count: parameters of the bucket that completes last. Raises: ValueError for an unknown option, and for a policy
    of updates that the options forbid.
    """
    if optimizer not in ARRAYS:
        raise ValueError(f"optimizer={optimizer!r}; known here: {', '.join(ARRAYS)}")
    where, form = as_offload(offload, stage), as_precision(precision)
    apart = min(world_size, host.count) > 1 and not host.reach
    if stage == 3 and apart:
        where = replace(where, params=where.params or "cpu")
    array_nbytes = 1 if optimizer.endswith("-8bit") else 4
    memory = gpu_formula(
        numel, stage, where, world_size, precision, ARRAYS[optimizer], array_nbytes, apart, accumulation
    )
    update = moment_of_updates(where, where.params == "nvme")
    sharers, by_host = _sharers(stage, world_size), _by_host(where, apart)
    beside = -(-world_size // host.count)
    job = Job(
        numel,
        stage,
        where,
        memory,
        form.dtype.itemsize,
        ARRAYS[optimizer] * array_nbytes + form.master_nbytes,
        update,
        clips or form.skip_nonfinite,
        accumulation,
        world_size,
        beside,
        sharers,
        by_host,
    )
    memory["cpu"]["slots"] += job.item * numel * job.adds_last
    moved = offloaded or {}
    tiers = {tier: sum(found.values()) + moved.get(tier, 0) for tier, found in memory.items()}
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
    computing = min(world_size, host.count)
    step = gpu_step(job, host.rates, None if flops is None else flops / computing, forward, last_count)
    tokens = _hiding_tokens(numel, computing, host.rates, step)
    return GpuCase(stage, offload, world_size, on_gpu, on_host, on_drive, step, tokens, lacks)


def gpu_formula(
    numel: int,
    stage: int,
    where: Offload,
    world_size: int,
    precision: str,
    state_arrays: int = 2,
    array_nbytes: int = 4,
    apart: bool = False,
    accumulation: int = 1,
) -> Memory:
    """Return ZeRO's formula of one rank with a GPU, by tier and purpose ([Note: tiers with a GPU]).

    apart: the ranks' GPUs do not reach each other. accumulation: micro-steps in a step. The other arguments, raises: as
    ``memory_formula``.
    """
    memory = memory_formula(numel, world_size, stage, precision, where, False, state_arrays, array_nbytes)
    if _by_host(where, apart):
        memory["cpu"]["gradients"] += memory["device"]["gradients"]
        memory["device"]["gradients"] *= where.gradients == "device"
        if is_used_up(where, where.update):
            memory["cpu"]["gradients"] = 0
        elif is_single_pass(where, world_size, accumulation):
            memory["cpu"]["gradients"] = as_precision(precision).dtype.itemsize * numel
        if where.params is None:
            copies = -(-numel // _sharers(stage, world_size))
            memory["cpu"]["parameters"] += copies * as_precision(precision).param_nbytes
    return memory


def _by_host(where: Offload, apart: bool) -> bool:
    return where.optimizer is not None or where.params is not None or apart


def _sharers(stage: int, world_size: int) -> int:
    """Return the number of ranks that share a copy of the weights on the host."""
    return world_size if shares_weights(stage, True) else 1


def _hiding_tokens(numel: int, computing: int, rates: Rates, step: GpuStep) -> float | None:
    """Return the tokens that hide the longest lane behind ``computing`` GPUs, at 6 FLOP per parameter and token.

    For one GPU and only the host's memory: bytes per parameter x FLOP/s / (6 x bytes/s of host memory).
    Source: arithmetic intensity, as ZeRO-Offload (arXiv:2101.06840) weighs it.
    """
    others = [seconds for lane, seconds in step.lanes.items() if lane != "compute"]
    known = [seconds for seconds in others if seconds is not None]
    if rates.flops is None or len(known) < len(others):
        return None
    return max(known) * rates.flops * computing / (6.0 * numel)
