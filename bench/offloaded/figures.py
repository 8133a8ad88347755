"""The figures of bench/finetune_llama.py and bench/offload.py: pure arithmetic, and two short measurements of the host.

[Note: figures] Seconds are of a step. *practicality* = step without offload / step with it. *overlap* = (Tc + Tm - T) /
min(Tc, Tm). Tc is forward and backward only, T the whole step. Tm is the longest phase that offload adds (the CPU's
pass over the state, copies, swap), each timed without the others. *MFU* = FLOP of the model per second / peak. *hiding
rule*: the tokens per step from which forward and backward take longer than the host's work. The host's work is its pass
over the state and the gradient sums of each micro-step. The rule: bytes per parameter x FLOP/s / (6 x bytes/s).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

import zcomm

MEASURED_NBYTES = 26  # per parameter, of CPUAdam: bf16 gradient 2, weight 2 + 2, remainder 2 + 2, m and v 8 + 8
STEP_NBYTES = 28  # of ZeroOptimizer: the same with the fp32 sum of gradients, 4
_LEAST = 0.05  # of a step: shorter times are below the noise
_SAMPLE = 48 << 20
_COPY_NBYTES = 128 << 20


@dataclass(frozen=True)
class Host:
    """Rates of this rank, while the others measure theirs, in bytes per second.

    step_bps: of the CPU's AdamW. copy_bps: of copies to and from the GPU, one direction (None without one).
    """

    step_bps: float
    copy_bps: float | None


def measure_host(device: torch.device, numel: int) -> Host:
    """Measure the rates in a second or two; needs up to 0.7 GB."""
    return Host(_step_bps(min(numel, _SAMPLE)), _copy_bps(device) if device.type == "cuda" else None)


def _step_bps(numel: int) -> float:
    weight = torch.zeros(numel, dtype=torch.bfloat16, requires_grad=True)
    weight.grad = torch.full_like(weight, 1e-3)
    optimizer = zcomm.optim.CPUAdam([weight], lr=1e-4)
    taken = []
    for _ in range(5):
        begin = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - begin)
    return MEASURED_NBYTES * numel / min(taken[1:])


def _copy_bps(device: torch.device) -> float:
    """Measure the slower of the two directions."""
    host, there = (
        zcomm.pinned_empty(_COPY_NBYTES, torch.uint8),
        torch.empty(_COPY_NBYTES, dtype=torch.uint8, device=device),
    )
    slowest = 0.0
    for target, source in ((host, there), (there, host)):
        taken = []
        for _ in range(4):
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - begin)
        slowest = max(slowest, min(taken))
    return _COPY_NBYTES / slowest


@dataclass(frozen=True)
class Times:
    """Seconds of a step of one rank.

    compute: forward and backward only; none: the step without offload. Each is None if it was not measured.
    """

    step: float
    compute: float | None
    none: float | None
    swap: float = 0.0


def mfu(flops_per_token: float, tokens_per_s: float, peak: float | None) -> float | None:
    """Return the MFU of one GPU. tokens_per_s: its own."""
    return None if peak is None else flops_per_token * tokens_per_s / peak


def host_nbytes(accum: int, world: int = 1) -> int:
    """Return the bytes of host memory read and written in a step, per parameter of a rank's share.

    They are the CPU's pass, and the traffic of each micro-step. That traffic is the bf16 gradients of all ranks (slots
    written, and read) and the fp32 sum (the first only writes). The norm reads the sum once more, unless one rank runs
    a single micro-step: then the device computes the squares.
    """
    norm = 4 if accum > 1 or world > 1 else 0
    return STEP_NBYTES + norm + accum * (4 * world + 8) - 4


def offloaded_s(host: Host, numel: int, itemsize: int, swap: float, accum: int = 1, world: int = 1) -> float:
    """Return the duration of the longest phase that offload adds to a step, each timed without the others.

    numel: of this rank's share. world: ranks with a share each; every rank copies the gradients of all shares.
    """
    copies = 0.0 if host.copy_bps is None else accum * world * numel * itemsize / host.copy_bps
    return max(numel * host_nbytes(accum, world) / host.step_bps, copies, swap)


def overlap(times: Times, added: float) -> float | None:
    """Return the overlap, see [Note: figures]; None if offload adds too little to measure."""
    if times.compute is None or added < _LEAST * times.step:
        return None
    return (times.compute + added - times.step) / min(times.compute, added)


def hiding(numel: int, tokens: int, compute: float | None, host: Host, accum: int = 1, world: int = 1) -> float | None:
    """Return the hiding rule's tokens per step and rank, at the measured FLOP/s of forward and backward.

    tokens: per step in that measurement. numel: this rank's share.
    """
    return None if compute is None else numel * host_nbytes(accum, world) / host.step_bps / compute * tokens


def shown(nbytes: float) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.1f} MiB"
