"""Loss curves of 50 steps, compared with DDP + torch.optim in fp32, and in bf16 with fp32 masters of bf16 weights.

The bf16 reference is plain torch, without autocast. It runs bf16 forward and backward of each rank's batch, with
gradients averaged in fp32. torch.optim.AdamW steps fp32 masters, and their rounded copies are the weights. The test
also measures the effect of exact masters: the same training without them ends far off.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from zero_jobs import Case, batch, groups, loss_of, small_gpt

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
Curve = list[float]
STEPS, LR, CLIP = 50, 3e-3, 0.5
CASES = [
    Case(0, None, 0.02),
    Case(1, "cpu"),
    Case(2, None, 0.02),
    Case(2, "nvme", 0.02),
    Case(3, None, share_parameters=False),
    Case(3, "nvme", 0.02),
]


def ours(case: Case, folder: str) -> Curve:
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    adamw = torch.optim.AdamW(groups(model), lr=LR)
    opt = zcomm.ZeroOptimizer(model, adamw, clip_norm=CLIP, nvme_path=folder, **case.arguments())
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch(comm.rank, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    opt.close()
    return losses


def all_of_ours(cases: list[Case], folder: str) -> list[Curve]:
    return [ours(case, folder) for case in cases]


def ddp(store: str) -> Curve:
    """Train by DistributedDataParallel over Gloo and torch.optim.AdamW."""
    import os
    import time

    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(small_gpt())
    opt = torch.optim.AdamW(groups(model.module), lr=LR)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch(rank, step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    time.sleep(0.3)  # DDP's destructor joins Gloo's threads while it holds the interpreter lock, which they need to end
    dist.destroy_process_group()
    return losses


def bf16_by_torch(world_size: int, exact_master: bool) -> list[Curve]:
    """Return the loss of each rank's batch, computed in one process."""
    model = small_gpt().bfloat16()
    weights = list(model.parameters())
    master = small_gpt()  # its parameters, before rounding
    if not exact_master:
        master.load_state_dict(model.state_dict())
    opt = torch.optim.AdamW(groups(master), lr=LR)
    curves: list[Curve] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        for param in master.parameters():
            param.grad = torch.zeros_like(param)
        for rank in range(world_size):
            loss = loss_of(model, *batch(rank, step))
            loss.backward()
            curves[rank].append(loss.item())
            for param, weight in zip(master.parameters(), weights, strict=True):
                assert param.grad is not None and weight.grad is not None
                param.grad += weight.grad.float() / world_size
                weight.grad = None
        torch.nn.utils.clip_grad_norm_(master.parameters(), CLIP)
        opt.step()
        with torch.no_grad():
            for param, weight in zip(master.parameters(), weights, strict=True):
                weight.copy_(param)
                if not exact_master:
                    param.copy_(weight)
    return curves


def bf16_with_and_without(world_size: int) -> tuple[list[Curve], list[Curve]]:
    """Train with exact masters and without."""
    return bf16_by_torch(world_size, True), bf16_by_torch(world_size, False)


def distance(one: Curve, other: Curve) -> float:
    """Return the largest relative difference."""
    assert len(one) == len(other) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def test_fp32_is_ddp_and_torch_optim(run_ranks: Run, tmp_path: Path) -> None:
    wanted = run_ranks(ddp, 2, str(tmp_path / "store"))
    found = run_ranks(all_of_ours, 2, CASES, str(tmp_path))
    for want, curves in zip(wanted, found, strict=True):
        assert max(want[40:]) < 0.9 * min(want[:3]), "it learns"
        for case, curve in zip(CASES, curves, strict=True):
            assert distance(curve, want) < 1e-5, f"{case}"


def test_bf16_is_bf16_with_an_fp32_master(run_ranks: Run, tmp_path: Path) -> None:
    cases = [Case(1, precision="bf16"), Case(2, "nvme", precision="bf16"), Case(3, "cpu", precision="bf16")]
    found = run_ranks(all_of_ours, 2, cases, str(tmp_path))
    ((wanted, inexact),) = run_ranks(bf16_with_and_without, 1, 2)
    for rank, curves in enumerate(found):
        off = distance(inexact[rank], wanted[rank])
        for case, curve in zip(cases, curves, strict=True):
            near = distance(curve, wanted[rank])
            assert near < 1e-3 and near < off / 5, f"{case}: {near}, without exact masters {off}"
