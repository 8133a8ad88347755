"""Muon for models on a (simulated) device: with state in host memory the CPU's bits, on the device a refusal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_device_state import small_pieces
from test_zero_device import same

Run = Callable[..., list[Any]]
ALONE = [
    Job(0, "cpu", optimizer="muon"), Job(2, "cpu", optimizer="muon", precision="bf16", clip=0.5, accum=2),
    Job(2, "nvme", optimizer="muon", fraction=0.5), Job(1, "nvme", optimizer="muon", precision="fp16"),
    Job(3, "nvme", optimizer="muon", precision="bf16"),
]  # fmt: skip
TOGETHER = [
    Job(0, "cpu", optimizer="muon"), Job(1, "nvme", optimizer="muon"),
    Job(2, "cpu", optimizer="muon", precision="fp16", clip=1.0), Job(3, "cpu", optimizer="muon", precision="bf16"),
    Job(3, "cpu", optimizer="muon", mixed=True, share_parameters=False), Job(3, "cpu", optimizer="muon", resident=True),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("jobs", [ALONE, TOGETHER], ids=["alone", "together"])
def test_the_bits_of_the_cpu(run_ranks: Run, tmp_path: Path, jobs: list[Job]) -> None:
    same(jobs, run_ranks(small_pieces, 1 + (jobs is TOGETHER), jobs, str(tmp_path), timeout_s=280))


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (None, r"muon: optimizer state on a device \(weight\) is not available.*use offload='cpu' or 'nvme'"),
        (zcomm.Offload("cpu", fraction=0.5), r"on a device \(fraction=0\.5\) is not available"),
        (zcomm.Offload("cpu", step_behind_forward=True), "step_behind_forward=True is not available"),
    ],
)
def test_what_is_refused(offload: Any, message: str) -> None:
    simulated.play(0.0, seed=0)
    with pytest.raises(NotImplementedError, match=message):
        zcomm.ZeroOptimizer(torch.nn.Linear(4, 3, bias=False), "muon", offload=offload)
