"""ZeRO over ranks without shared memory: every stage trains, and all stages give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm


def train(stage: int) -> list[float]:
    comm = zcomm.init("tcp", timeout=30)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    opt = zcomm.ZeroOptimizer(model, lr=1e-2, stage=stage)
    for step in range(3):
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(data).square().mean().backward()
        opt.step()
        opt.zero_grad()
    model.eval()
    result = model(torch.ones(1, 16)).flatten().tolist()
    opt.close()
    return result


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_stages_train_the_same_bits_over_tcp(stage: int, run_ranks: Callable[..., list[Any]]) -> None:
    base = run_ranks(train, 2, 0)
    assert base[0] == base[1]
    assert run_ranks(train, 2, stage) == base
