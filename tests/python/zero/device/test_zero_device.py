"""Training on a device (a simulated one, with random delays): the bits of the ordinary run on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from device_jobs import Job, pairs
from test_corners import KINDS
from tiers import long, one_in

Run = Callable[..., list[Any]]
DELAY_S = 0.0005

# The bits must be those of the run on the CPU, whatever the stage, the tier and the way of stepping.
JOBS = [
    Job(0), Job(0, precision="bf16", clip=1.0, accum=2), Job(0, "nvme", overlap=False),
    Job(1), Job(1, "nvme", fraction=0.5, optimizer="momentum"), Job(1, precision="fp16", accum=3),
    Job(2), Job(2, clip=0.5), Job(2, precision="bf16", accum=2), Job(2, "nvme", precision="bf16", clip=1.0),
    Job(2, share_parameters=False, optimizer="nadam"), Job(2, bucket_mb=25.0), Job(2, behind=True),
    Job(2, behind=True, clip=0.5, accum=2, precision="bf16"), Job(1, "nvme", behind=True, precision="fp16"),
    Job(0, behind=True, optimizer="momentum"), Job(1, behind=True, share_parameters=False),
    Job(3), Job(3, precision="bf16", prefetch=0), Job(3, clip=1.0, accum=2, prefetch=3),
    Job(3, "nvme", precision="bf16"), Job(3, "nvme", accum=2, fraction=0.5), Job(3, share_parameters=False),
    Job(3, "nvme", share_parameters=False, clip=0.5), Job(3, precision="fp16", optimizer="momentum", overlap=False),
]  # fmt: skip


def same(jobs: list[Job], per_rank: list[list[tuple[dict[str, Any], dict[str, Any]]]]) -> None:
    for rank, found in enumerate(per_rank):
        for job, (plain, there) in zip(jobs, found, strict=True):
            assert there == plain, f"rank {rank}: {job}"
            assert len(set(plain["losses"])) == len(plain["losses"]), f"{job}: it learns"
            assert there["bits"] == per_rank[0][jobs.index(job)][1]["bits"], f"{job}: ranks differ"


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_the_bits_of_the_cpu(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    same(JOBS, run_ranks(pairs, world_size, JOBS, str(tmp_path), DELAY_S, timeout_s=280))


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("kind", one_in(3, 0, KINDS[1:], long))  # test_device_peers, test_device_mixed run the others
def test_models_off_the_straight_road(run_ranks: Run, tmp_path: Path, kind: str) -> None:
    job = Job(3, kind=kind)
    jobs = [Job(2, kind=kind), job, replace(job, prefetch=0), replace(job, offload="nvme", prefetch=2)]
    jobs += [replace(job, max_bytes=4992), replace(job, offload="nvme", prefetch=0, max_bytes=4800)]  # of a Linear
    jobs.append(replace(job, share_parameters=False))
    same(jobs, run_ranks(pairs, 2, jobs, str(tmp_path), DELAY_S, timeout_s=280))


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_many_late_steps(run_ranks: Run, tmp_path: Path) -> None:
    jobs = [Job(2), Job(2, clip=1.0, behind=True), Job(3, prefetch=2), Job(3, "nvme", precision="bf16")]
    same(jobs, run_ranks(pairs, 2, jobs, str(tmp_path), 0.001, 60, timeout_s=280))
