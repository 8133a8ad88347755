"""Measurement of the speeds of this machine: `zcomm doctor --calibrate` starts this module as ranks of three worlds.

All ranks of a world measure the same at the same time, each with its part of the CPUs, as in training. The worlds have
one rank, one rank per CPU, and two ranks. The median of the slowest rank counts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zcomm.cli.calibration_ranks import Work, answer, medians, run_ranks
from zcomm.launch.environment import core_count
from zcomm.machine import speeds
from zcomm.machine.speeds import Speeds

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zcomm import Communicator

_ROUNDS = 7
_NEAR, _FAR = 1 << 18, 16 << 20  # elements of 4 bytes
_BUCKET_NBYTES = 16 << 20
_STARTS = 500  # forward and backward of products in a row


def calibrate(timeout_s: float = 120.0) -> Path:
    """Measure all worlds and save the result. Raises: RuntimeError with a rank's stderr, OSError."""
    cpus = core_count()
    worlds = sorted({1, max(2, min(cpus, 4)), 2 * cpus})
    rows = []
    for world_size in worlds:
        threads = max(1, cpus // world_size)
        rows.append(Speeds(**json.loads(run_ranks("zcomm.cli.calibrate_speeds", world_size, threads, timeout_s))))
    return speeds.save(rows)


def _measure(job: Communicator) -> Speeds:
    import torch

    from zcomm.planning import work_of

    def flops(dtype: torch.dtype, n: int) -> Work:
        one = torch.randn(n, n).to(dtype)
        return lambda: one @ one

    def adding(count: int, times: int) -> Work:
        one, other, out = torch.ones(count), torch.ones(count), torch.empty(count)

        def work() -> None:
            for _ in range(times):
                torch.add(one, other, out=out)

        return work

    few = torch.ones(16, requires_grad=True)

    def start() -> None:
        out = few
        for _ in range(_STARTS // 2):
            out = out * 0.5
        out.sum().backward()

    bucket = job.empty(_BUCKET_NBYTES // 4 // job.world_size * job.world_size)
    shard = torch.empty(bucket.numel() // job.world_size)
    model, x = _blocks()
    works: dict[str, Work] = {
        "fp32": flops(torch.float32, 768),
        "bf16": flops(torch.bfloat16, 768),
        "fp16": flops(torch.float16, 256),  # slow on many CPUs
        "near": adding(_NEAR // 4, 20),
        "far": adding(_FAR, 1),
        "start": start,
        "reduce": lambda: job.reduce_scatter(bucket, out=shard),
        "blocks": lambda: model(x).sum().backward(),
    }
    taken = dict(zip(works, medians(job, list(works.values()), _ROUNDS), strict=True))
    found = Speeds(
        world_size=job.world_size,
        flops={name: 2 * n**3 / taken[name] for name, n in (("fp32", 768), ("bf16", 768), ("fp16", 256))},
        near_bps=3 * _NEAR * 20 / taken["near"],
        far_bps=3 * 4 * _FAR / taken["far"],
        start_s=taken["start"] / _STARTS,
        reduce_bps=bucket.nbytes / taken["reduce"],
    )
    with torch.device("meta"):
        planned = work_of(*_blocks()).seconds(found, "fp32")
    return replace(found, slowdown=max(1.0, taken["blocks"] / planned))


def _blocks() -> tuple[nn.Module, torch.Tensor]:
    """Build two blocks of a transformer: their time beyond the measured speeds is the slowdown."""
    import torch
    from torch import nn

    blocks = [nn.TransformerEncoderLayer(256, 4, 1024, 0.0, "gelu", batch_first=True) for _ in range(2)]
    return nn.Sequential(*blocks), torch.ones(4, 128, 256)


if __name__ == "__main__":
    answer(_measure)
