"""torch.compile of units: the same bits in every stage and tier."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from test_corners import PRIVATE, Net, loss_of
from zero_jobs import Case, digest

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]


def train_compiled(folder: str, before: bool, backend: str = "aot_eager") -> list[Any]:
    comm = zcomm.init(timeout=60)
    ends = []
    for case in (Case(2), PRIVATE, Case(3, "nvme", 0.02), Case(3, "nvme", 0.02, max_bytes=4800)):
        torch.manual_seed(0)
        torch._dynamo.reset()
        net = Net("plain")
        for late in (False, True):
            if late is not before:
                for block in net.blocks:
                    block.compile(backend=backend)
            if not late:
                opt = zcomm.ZeroOptimizer(net, nvme_path=folder, **case.arguments())
        losses = []
        for step in range(3):
            loss = loss_of(net, comm.rank, step)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        ends.append((losses, digest(opt.full_state_dict())))
        opt.close()
    return ends


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("world_size", "before"), [(1, True), (1, False), (2, True)])
def test_compiled_units_have_the_same_bits(run_ranks: Run, tmp_path: Path, world_size: int, before: bool) -> None:
    """Compile each block by torch.compile, before or after ZeroOptimizer."""
    for ends in run_ranks(train_compiled, world_size, str(tmp_path), before, timeout_s=280):
        assert len(set(ends[0][0])) == 3, "it learns"
        assert ends == ends[:1] * 4


@pytest.mark.timeout_s(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_units_that_inductor_compiled(run_ranks: Run, tmp_path: Path) -> None:
    """Its kernels round differently: the same bits in every stage, and eager's losses to 1e-5."""
    (ends,) = run_ranks(train_compiled, 1, str(tmp_path), True, "inductor", timeout_s=580)
    (eager,) = run_ranks(train_compiled, 1, str(tmp_path), True, "eager", timeout_s=280)
    assert ends[1] == ends[0] and ends[2] == ends[0]
    assert ends[0][0] == pytest.approx(eager[0][0], rel=1e-5) and len(set(ends[0][0])) == 3
