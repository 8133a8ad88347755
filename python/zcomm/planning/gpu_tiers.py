"""Needs of a case of stage and offload on a machine with GPUs: bytes by tier, seconds per step, what hides what.

[Note: tiers with a GPU] Each rank has a device copy of what stage shards do not take (D4 shares memory on CPUs only).
Where the optimizer's state is offloaded, the weights and the fp32 sums of gradients are in host memory, too. The CPU
steps there, gradients leave the GPU by buckets during backward, weights return. Without offload nothing is needed of
the host where a rank is alone or the GPUs reach each other. Where they do not, ranks reduce on the host. State that
stays on the GPU is stepped there on sums and weights that come from the host. Shards of stage 3 are on the host, too.
Bytes are ZeRO's formula: slots, staging and padding come on top, some hundred MiB. Seconds are of all ranks, which
share the host's memory, the PCIe link of their GPU and the drive. Bytes between GPUs are not in them. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zcomm.machine.gpu_specs import PAYLOAD
from zcomm.planning.estimate import ARRAYS
from zcomm.zero.memory import memory_formula
from zcomm.zero.options import as_offload, as_precision

CONTEXT_NBYTES = 640 << 20  # of a process on a GPU: driver, torch's kernels and workspaces
MFU = 0.4  # of the peak, to plan with


@dataclass(frozen=True)
class GpuHost:
    """Capacities in bytes; rates in bytes (flops: operations) per second, None where they are not known.

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
    None where a rate is not known. hiding_tokens: per step and over all ranks, from which on the GPUs compute longer
    than the longest of them, at MFU of the peak. lacks: what is too small.
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
    by_host = where.optimizer is not None or where.params is not None or apart
    if by_host:
        memory["cpu"]["gradients"] += memory["device"]["gradients"]
        memory["device"]["gradients"] = 0
        if where.params is None:
            memory["cpu"]["parameters"] += (-(-numel // world_size) if stage else numel) * form.param_nbytes
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
    rates = _Seconds(numel, world_size, stage, host, by_host, where.optimizer is not None, where.params is not None)
    pcie = rates.pcie(form.dtype.itemsize, accumulation, beside)
    state_nbytes = ARRAYS[optimizer] * array_nbytes + form.master_nbytes
    steppers = 1 if stage else world_size  # stage 0: each rank steps everything
    normed = world_size > 1 or accumulation > 1  # else the GPU squares what leaves it
    per_param = 2 * state_nbytes + 2 * form.dtype.itemsize + 4 + 4 * normed  # state, weight, sum, norm
    update = rates.update(steppers * per_param)
    sums = rates.sums(form.dtype.itemsize, accumulation)
    swap = rates.swap(memory["nvme"]["optimizer"], memory["nvme"]["parameters"], accumulation)
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
        rates.tokens(pcie, None if update is None or sums is None else update + sums, swap),
        lacks,
    )


@dataclass(frozen=True)
class _Seconds:
    numel: int
    world_size: int
    stage: int
    host: GpuHost
    by_host: bool
    offloaded: bool
    params_offloaded: bool

    def pcie(self, itemsize: int, accumulation: int, beside: int) -> float | None:
        """Return the seconds of PCIe in a step.

        Gradients go down each micro-step, weights up each step. Offloaded parameters go up for forward and backward of
        each micro-step: of the whole model, on each rank. For a step on the GPU the rank's share of sums and weights
        goes up, too, and of weights down. Both directions at once.
        """
        if not self.by_host:
            return 0.0
        if self.host.pcie_bps is None:
            return None
        share = 0.0 if self.offloaded else 1 / (self.world_size if self.stage else 1)  # stage 0: each steps everything
        down = (accumulation + share) * itemsize
        up = (2 * accumulation if self.params_offloaded else 1) * itemsize + share * (4 + itemsize)
        return beside * max(down, up) * self.numel / (PAYLOAD * self.host.pcie_bps)

    def update(self, per_param: int) -> float | None:
        if not self.offloaded:
            return 0.0
        return None if self.host.memory_bps is None else per_param * self.numel / self.host.memory_bps

    def sums(self, itemsize: int, accumulation: int) -> float | None:
        """Return the seconds of summing gradients in host memory.

        Gradients of each micro-step go into host slots, out of them, and into the fp32 sum, which the first only
        writes. In stage 0 each rank reads and writes the other ranks' parts of it.
        """
        if not self.by_host:
            return 0.0
        if self.host.memory_bps is None:
            return None
        per_param = accumulation * (2 * itemsize * self.world_size + 8) - 4
        per_param += 0 if self.stage else 8 * (self.world_size - 1)
        return per_param * self.numel / self.host.memory_bps

    def swap(self, state: int, params: int, accumulation: int) -> float | None:
        """Return the drive's seconds: state and parameters once each way, offloaded parameters for each gather."""
        if not state + params:
            return 0.0
        if self.host.drive_bps is None:
            return None
        read, written = state + params * (1 + 2 * accumulation), state + params
        return self.world_size * (read / self.host.drive_bps[0] + written / self.host.drive_bps[1])

    def tokens(self, *seconds: float | None) -> float | None:
        """Return the tokens that hide the longest of ``seconds``, at 6 FLOP per parameter and token.

        For one GPU and the CPU's pass alone: bytes per parameter x FLOP/s / (6 x bytes/s of host memory).
        Source: arithmetic intensity, as ZeRO-Offload (arXiv:2101.06840) weighs it.
        """
        known = [each for each in seconds if each is not None]
        if self.host.flops is None or len(known) < len(seconds):
            return None
        return max(known) * MFU * self.host.flops * min(self.world_size, self.host.count) / (6.0 * self.numel)
