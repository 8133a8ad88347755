"""Unit-wise stage 3: a failed read of weights raises an error, and the next use reads them again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from zero_jobs import digest

Run = Callable[..., list[Any]]
WIDTH = 16
DRIVE = zcomm.Offload("nvme", "nvme", update="step")  # reads of a forward that updates poison


def train(folder: str, failing: int | None, on_device: bool) -> str:
    """Train. failing: index of the bucket with one failed read."""
    zcomm.init(timeout=60)
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 1))
    if on_device:
        simulated.play(0.001)
    opt = zcomm.ZeroOptimizer(
        net, "adamw", stage=3, offload=DRIVE, nvme_path=folder, prefetch=0, share_parameters=False, bucket_mb=0.001
    )
    source = opt._live.store.source
    fetch, armed = source.fetch, [False]

    def refused(bucket: Any, out: torch.Tensor) -> Any:
        if armed[0] and bucket.index == failing:
            armed[0] = False
            raise OSError(errno.EIO, f"bucket {bucket.index}")
        return fetch(bucket, out)

    source.fetch = refused
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        if step == 1 and failing is not None:
            armed[0] = True
            with pytest.raises(OSError, match=f"bucket {failing}"):
                net(x)
            assert not armed[0]
        net(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    found = digest(opt.full_state_dict())
    opt.close()
    if on_device:
        simulated.stop()
    return found


@pytest.mark.parametrize("on_device", [False, True])
def test_the_next_pass_reads_them(run_ranks: Run, tmp_path: Path, on_device: bool) -> None:
    [wanted] = run_ranks(train, 1, str(tmp_path), None, on_device)
    for failing in (2, 5):
        assert run_ranks(train, 1, str(tmp_path), failing, on_device) == [wanted], failing
