"""Division by the micro-steps: scale_wrt_gas=False leaves it to the caller, as Hugging Face's Trainer does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero import full_grad, full_param

Run = Callable[..., list[Any]]
STEPS = 3


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(batch(number, rank)).float().square().mean()


def train(accum: int, divided: bool, stage: int) -> dict[str, Any]:
    """Train. divided: the caller divides the loss, and the engine knows it."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": 0.3,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}},
        "zero_optimization": {"stage": stage},
    }
    engine = zcomm.initialize(model=network(), config=config)[0]
    grads, norms = [], []
    for number in range(STEPS * accum):
        loss = loss_of(engine, number, zcomm.rank())
        if divided:
            engine.backward(loss / accum, scale_wrt_gas=False)
        else:
            engine.backward(loss)
        if engine.is_gradient_accumulation_boundary():
            grads.append(full_grad(engine.module[0].weight))
        engine.step()
        if engine.micro_steps % accum == 0:
            norms.append(engine.get_global_grad_norm())
    weights = [full_param(param) for param in engine.module.parameters()]
    engine.destroy()
    return {"grads": grads, "norms": norms, "weights": weights}


def plain(accum: int, world_size: int) -> list[torch.Tensor]:
    """Train only by torch: the whole batch, every loss divided."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        for micro in range(accum):
            for rank in range(world_size):
                (loss_of(model, step * accum + micro, rank) / (accum * world_size)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def compare(accum: int) -> None:
    comm = zcomm.init(timeout=60)
    wanted = plain(accum, comm.world_size)
    for stage in (1, 2, 3):
        ours, theirs = train(accum, True, stage), train(accum, False, stage)
        assert len(ours["norms"]) == len(ours["grads"]) == STEPS
        for key in ("grads", "weights"):
            for one, other in zip(ours[key], theirs[key], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
                assert accum == 3 or torch.equal(one, other), "a power of two divides without rounding"
        for one, other in zip(ours["weights"], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)


@pytest.mark.parametrize("accum", [3, slow(4)])
def test_the_numbers_are_those_of_plain_accumulation(run_ranks: Run, accum: int) -> None:
    run_ranks(compare, 2, accum)
