"""Report of bench/finetune_llama.py at its end; job is its Job."""

from __future__ import annotations

import resource
from typing import Any

import torch

import zcomm
from offloaded import figures


def report(
    job: Any, optimizer: zcomm.ZeroOptimizer, times: figures.Times, name: str, host: figures.Host, moved: float
) -> None:
    """Print times, MFU, memory and traffic of the run."""
    say, rate = job.say, job.tokens / times.step
    alone, none = _seconds(times.compute), _seconds(times.none)
    say(f"\nstep {times.step:.3f} s; forward and backward {alone}; without offload {none} ({name})")
    used = figures.mfu(job.flops_per_token, rate, job.peak)
    formula = f"{job.flops_per_token / 1e9:.2f} GFLOP/token (6 per weight, 12 x layers x width x context)"
    if used is None or job.peak is None:
        say(f"MFU: the bf16 peak of {job.name!r} is not known here (--peak-tflops); {formula}")
    else:
        say(f"MFU {100 * used:.1f} %: {formula} x {rate:.0f} tokens/s / {job.peak / 1e12:.0f} TFLOP/s of {job.name}")
    if job.arguments.offload != "none":
        report_offload(job, times, host)
    for tier, purposes in optimizer.memory().items():
        if any(purposes.values()):
            listed = ", ".join(f"{what} {figures.shown(n)}" for what, n in purposes.items() if n)
            say(f"memory, {tier}: {figures.shown(sum(purposes.values()))} ({listed})")
    if job.device.type == "cuda":
        say(f"memory of torch on the GPU at most: {figures.shown(torch.cuda.max_memory_allocated(job.device))}")
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    say(f"memory of the process at most: {figures.shown(peak)}")
    if moved:
        say(f"NVMe: {figures.shown(moved)} read and written per step and rank")


def report_offload(job: Any, times: figures.Times, host: figures.Host) -> None:
    """Print the cost of offload and how much of it compute hid."""
    say = job.say
    accum, world = job.arguments.accum, job.comm.world_size
    share = job.numel // world
    if times.none is not None:
        say(f"practicality {times.none / times.step:.3f}: step without offload / with")
    elif times.compute is not None:
        part = times.compute / times.step
        say(f"practicality: not measured, as no step without offload was; forward and backward / step {part:.3f}")
    added = figures.offloaded_s(host, share, 2, times.swap, accum, world)
    hidden = figures.overlap(times, added)
    parts = [f"sums and CPU step at {host.step_bps / 1e9:.1f} GB/s"]
    parts += [] if host.copy_bps is None else [f"copies at {host.copy_bps / 1e9:.1f} GB/s"]
    parts += [f"swap {times.swap:.3f} s"] if times.swap else []
    say(f"overlap {_ratio(hidden)}: offload by itself takes {added:.4f} s ({', '.join(parts)})")
    needed = figures.hiding(share, job.tokens, times.compute, host, accum, world)
    if needed is not None:
        side = "past" if job.tokens >= needed else "below"
        say(f"hiding rule: {needed:.0f} tokens per step and rank hide the host's work; {job.tokens} here: {side} it")


def _ratio(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f} s"
