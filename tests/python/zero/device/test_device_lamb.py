"""LAMB on a (simulated) device: norms of whole parameters of which parts lie on devices and on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from device_jobs import Job
from test_device_peers import compare
from test_device_state import small_pieces
from test_zero_device import same

Run = Callable[..., list[Any]]
ALONE = [
    Job(0, None, optimizer="lamb"), Job(2, None, optimizer="lamb", precision="bf16", clip=0.5, accum=2),
    Job(2, "cpu", optimizer="lamb", precision="fp16"), Job(1, fraction=0.5, optimizer="lamb"),
    Job(2, "mixed", optimizer="lamb", behind=True), Job(3, "mixed", optimizer="lamb", precision="bf16"),
    Job(2, "nvme", optimizer="lamb"), Job(2, None, optimizer="lamb", precision="fp16"),
]  # fmt: skip
TOGETHER = [
    Job(0, None, optimizer="lamb"), Job(0, "cpu", optimizer="lamb", behind=True), Job(1, None, optimizer="lamb"),
    Job(2, fraction=0.5, optimizer="lamb", precision="fp16"), Job(3, None, optimizer="lamb", precision="bf16"),
    Job(3, "mixed", optimizer="lamb", mixed=True, share_parameters=False), Job(2, "mixed", optimizer="lamb", clip=1.0),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("jobs", [ALONE, TOGETHER], ids=["alone", "together"])
def test_the_bits_of_the_cpu(run_ranks: Run, tmp_path: Path, jobs: list[Job]) -> None:
    same(jobs, run_ranks(small_pieces, 1 + (jobs is TOGETHER), jobs, str(tmp_path), timeout_s=280))


PEERS = [
    Job(0, None, optimizer="lamb", clip=0.5), Job(2, "mixed", optimizer="lamb", precision="bf16"),
    Job(3, None, optimizer="lamb", resident=True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("job", PEERS, ids=str)
def test_devices_that_reach_each_other(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path)
