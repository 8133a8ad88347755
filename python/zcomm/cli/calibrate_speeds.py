"""Measuring the speeds of this machine: `zcomm doctor --calibrate` starts this module as ranks of three worlds.

All ranks of a world do the same at the same time, each with its part of the CPUs, as in training: one rank alone, one
rank per CPU, two. The median of the slowest rank counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zcomm import speeds
from zcomm.cli.calibration_ranks import answer, run_ranks
from zcomm.launch.environment import core_count
from zcomm.speeds import Speeds

if TYPE_CHECKING:
    from zcomm import Communicator

_ROUNDS = 7
_NEAR, _FAR = 1 << 18, 16 << 20  # elements of 4 bytes
_BUCKET_NBYTES = 16 << 20


def calibrate(timeout_s: float = 120.0) -> Path:
    """Measure all worlds and keep the result. Raises: RuntimeError with a rank's last words, OSError."""
    cpus = core_count()
    worlds = sorted({1, max(2, min(cpus, 4)), 2 * cpus})
    rows = []
    for world_size in worlds:
        threads = max(1, cpus // world_size)
        rows.append(Speeds(**json.loads(run_ranks("zcomm.cli.calibrate_speeds", world_size, threads, timeout_s))))
    return speeds.save(rows)


def _measure(job: Communicator) -> Speeds:
    import torch

    def seconds(work: Callable[[], object], rounds: int = _ROUNDS) -> float:
        work()
        taken = []
        for _ in range(rounds):
            job.barrier()
            begin = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begin)
        slowest = torch.tensor([statistics.median(taken)], dtype=torch.float64)
        job.all_reduce(slowest, "max")
        return float(slowest)

    def flops(dtype: torch.dtype, n: int) -> float:
        one = torch.randn(n, n).to(dtype)
        return 2 * n**3 / seconds(lambda: one @ one)

    def bytes_per_s(count: int, times: int) -> float:
        one, other, out = torch.ones(count), torch.ones(count), torch.empty(count)

        def work() -> None:
            for _ in range(times):
                torch.add(one, other, out=out)

        return 3 * one.nbytes * times / seconds(work)

    few = torch.ones(16, requires_grad=True)
    starts = 500  # forward and backward of products in a row

    def start() -> None:
        out = few
        for _ in range(starts // 2):
            out = out * 0.5
        out.sum().backward()

    bucket = job.empty(_BUCKET_NBYTES // 4 // job.world_size * job.world_size)
    shard = torch.empty(bucket.numel() // job.world_size)
    found = Speeds(
        world_size=job.world_size,
        flops={
            "fp32": flops(torch.float32, 768),
            "bf16": flops(torch.bfloat16, 768),
            "fp16": flops(torch.float16, 256),  # slow on many CPUs
        },
        near_bps=bytes_per_s(_NEAR // 4, 20),
        far_bps=bytes_per_s(_FAR, 1),
        start_s=seconds(start) / starts,
        reduce_bps=bucket.nbytes / seconds(lambda: job.reduce_scatter(bucket, out=shard)),
    )
    return replace(found, slowdown=_slowdown(found, seconds))


def _slowdown(found: Speeds, seconds: Callable[[Callable[[], object]], float]) -> float:
    """Two blocks of a transformer, forward and backward: measured, of what the other speeds say."""
    import torch
    from torch import nn

    from zcomm.planning import work_of

    def make() -> tuple[nn.Module, torch.Tensor]:
        blocks = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True) for _ in range(2)]
        return nn.Sequential(*blocks), torch.ones(4, 128, 256)

    with torch.device("meta"):
        model, x = make()
        planned = work_of(model, x).seconds(found, "fp32")
    model, x = make()
    return max(1.0, seconds(lambda: model(x).sum().backward()) / planned)


if __name__ == "__main__":
    answer(_measure)
