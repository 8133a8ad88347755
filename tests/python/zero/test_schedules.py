"""torch's LR schedulers over param groups with different rates: torch's rates, and the same bits in every stage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import zcomm
from tiers import one_in
from zero_jobs import digest

Run = Callable[..., list[Any]]
PLACES: list[tuple[int, str | None]] = [(0, None), (1, None), (2, "cpu"), (3, None), (3, "nvme")]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=[0.05, 0.01], total_steps=12),
    "restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 5),
    "lambdas": lambda opt: lr_scheduler.LambdaLR(opt, [lambda epoch: 0.9**epoch, lambda epoch: 1 / (1 + epoch)]),
    "in turn": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.1, total_iters=4), lr_scheduler.ExponentialLR(opt, 0.9)], [4]
    ),
    "plateau": lambda opt: lr_scheduler.ReduceLROnPlateau(opt, patience=1, factor=0.5),
}


def made() -> tuple[nn.Module, list[dict[str, Any]]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 4))
    matrices, vectors = ([p for p in net.parameters() if (p.ndim > 1) == kind] for kind in (True, False))
    return net, [{"params": matrices, "lr": 0.02, "weight_decay": 0.1}, {"params": vectors, "lr": 0.005}]


def loss_of(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    return net(x).square().mean()


def train(net: nn.Module, opt: Any, schedule: Any, loss: Callable[[int], torch.Tensor]) -> list[list[float]]:
    rates = []
    for step in range(8):
        loss(step).backward()
        opt.step()
        opt.zero_grad()
        schedule.step(*([float(step % 3)] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))
        rates.append([group["lr"] for group in opt.param_groups])
    return rates


def compare(name: str, folder: str) -> None:
    comm = zcomm.init(timeout=60)
    net, groups = made()
    plain = torch.optim.AdamW(groups, weight_decay=0.0)
    world = range(comm.world_size)

    def mean(step: int) -> torch.Tensor:
        return sum((loss_of(net, rank, step) for rank in world), torch.zeros(())) / comm.world_size

    wanted = train(net, plain, SCHEDULES[name](plain), mean)
    assert len({tuple(rates) for rates in wanted}) > 2, "it moves"
    ends = set()
    for stage, offload in PLACES:
        model, groups = made()
        adamw = torch.optim.AdamW(groups, weight_decay=0.0)
        opt = zcomm.ZeroOptimizer(model, adamw, stage=stage, offload=offload, nvme_path=folder)
        found = train(model, opt, SCHEDULES[name](opt), lambda step, model=model: loss_of(model, comm.rank, step))
        assert found == wanted, f"{name}, stage {stage} {offload}"
        weights = opt.full_state_dict()
        for key, value in net.named_parameters():
            torch.testing.assert_close(weights[key], value.detach(), rtol=2e-4, atol=2e-6)
        ends.add(digest(weights))
        opt.close()
    assert len(ends) == 1, "the same bits in every stage and tier"


@pytest.mark.parametrize("name", one_in(len(SCHEDULES), 0, list(SCHEDULES)))
def test_rates_and_bits(run_ranks: Run, tmp_path: Path, name: str) -> None:
    run_ranks(compare, 2, name, str(tmp_path))
