"""Random layer-token drop: gathers by hand, gradients in fp64, schedule, ranks, recomputation, names and resumes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.engine.token_drop import (
    RandomLayerTokenDrop,
    RandomLTDScheduler,
    convert_to_random_ltd,
    cut_mask,
    gather_tokens,
    sample_tokens,
    scatter_tokens,
)
from zero_jobs import digest

Run = Callable[..., list[Any]]
WIDTH, LENGTH = 8, 12


class Mixer(nn.Module):
    """A causal layer: each token becomes a mean of the tokens before it. ``seen``: the lengths of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, str]:
        self.seen.append(x.shape[1])
        weights = torch.ones(x.shape[1], x.shape[1]).tril() if mask is None else mask[:, 0].float()
        return x + torch.tanh(self.linear(weights / weights.sum(-1, keepdim=True) @ x)), "more"


class Stack(nn.Module):
    def __init__(self, recompute: bool = False, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Mixer() for _ in range(count))
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(1, 1, x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            x = (checkpoint(layer, x, mask, use_reentrant=False) if self.recompute else layer(x, mask))[0]
        return x


LTD = {
    "enabled": True,
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 4,
        "max_value": 12,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 4, "seq_per_step": 2},
    },
}


def config(stage: int = 1, **ltd: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD | ltd}},
    }


def engine_of(recompute: bool = False, stage: int = 1) -> Any:
    engine = zcomm.initialize(model=Stack(recompute), config=config(stage))[0]
    return convert_to_random_ltd(engine, Mixer)


def losses(engine: Any, steps: int, first: int = 0) -> list[str]:
    found = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        loss = engine(torch.randn(2, LENGTH, WIDTH, generator=generator)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item().hex())
    return found


def test_schedule_by_formula() -> None:
    scheduler = RandomLTDScheduler({**LTD, "global_batch_size": 6})
    seen, total = [], 0
    for step in range(6):
        scheduler.update_seq(step)
        scheduler.update_seq(step)  # of a second micro-step: tokens are counted once
        seen.append(scheduler.get_current_seq())
        total += 6 * (seen[-1] * 2 + 12 * 2)
    assert seen == [4, 6, 8, 10, 12, 12]
    assert scheduler.state_dict() == {
        "consumed_layer_tokens": total,
        "current_steps": 5,
        "current_value": 12,
        "min_value": 4,
        "max_value": 12,
    }
    odd = RandomLTDScheduler(
        {
            **LTD,
            "global_batch_size": 1,
            "random_ltd_schedule": {**LTD["random_ltd_schedule"], "min_value": 5},  # type: ignore[dict-item]
        }
    )
    assert odd.get_value(0) == 5  # not below min_value


@pytest.mark.parametrize("batch_first", [True, False])
def test_gather_and_scatter_by_hand(batch_first: bool) -> None:
    x = torch.randn(3, LENGTH, WIDTH, dtype=torch.float64)
    kept = sample_tokens(5, LENGTH, 3, torch.Generator().manual_seed(0))
    assert all(sorted(set(row)) == row for row in kept.tolist())
    given = x if batch_first else x.transpose(0, 1)
    part = gather_tokens(given, kept, batch_first)
    by_hand = torch.stack([x[sample, kept[sample]] for sample in range(3)])
    assert torch.equal(part if batch_first else part.transpose(0, 1), by_hand)
    whole = scatter_tokens(given, 2 * part, kept, batch_first)
    expected = x.clone()
    for sample in range(3):
        expected[sample, kept[sample]] *= 2
    assert torch.equal(whole if batch_first else whole.transpose(0, 1), expected)

    def drop(a: torch.Tensor) -> torch.Tensor:
        return scatter_tokens(a, gather_tokens(a, kept, batch_first).sin(), kept, batch_first)

    assert torch.autograd.gradcheck(drop, (given.detach().clone().requires_grad_(),))


def test_all_tokens_are_equally_likely() -> None:
    counts = torch.bincount(sample_tokens(4, 8, 4000, torch.Generator().manual_seed(0)).flatten(), minlength=8)
    assert (counts - 2000).abs().max() < 250  # 8 standard deviations


def test_masks() -> None:
    kept = torch.tensor([[0, 2], [1, 3]])
    padding = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    assert cut_mask(padding, kept, 4).tolist() == [[1, 1], [1, 0]]
    causal = torch.ones(4, 4).tril()
    assert cut_mask(causal, kept, 4).tolist() == [[1, 0], [1, 1]]
    one = torch.arange(4.0).view(1, 1, 1, 4)  # as Hugging Face's encoders have it
    assert cut_mask(one, kept, 4).flatten(1).tolist() == [[0, 2], [1, 3]]
    full = torch.arange(16.0).view(1, 1, 4, 4)
    assert cut_mask(full, kept, 4).flatten(1).tolist() == [[0, 2, 8, 10], [5, 7, 13, 15]]
    assert cut_mask(None, kept, 4) is None
    with pytest.raises(ValueError, match="give it 4 dimensions"):
        cut_mask(causal[:2, :2], kept, 2)


def test_a_layer_by_hand() -> None:
    layer = Mixer()
    drop = RandomLayerTokenDrop(layer)
    scheduler = RandomLTDScheduler({**LTD, "global_batch_size": 1})
    drop.init_config({**LTD, "model_mask_name": None}, scheduler, 0)
    x = torch.randn(2, LENGTH, WIDTH)
    y, rest = drop(x)
    kept = scheduler.draw(0, 2, LENGTH, 4)
    expected = x.clone()
    for sample in range(2):
        expected[sample, kept[sample]] = layer(x[sample, kept[sample]][None])[0][0]
    assert rest == "more" and layer.seen[0] == 4
    torch.testing.assert_close(y, expected)
    assert drop.state_dict().keys() == layer.state_dict().keys() and drop.seen is layer.seen
    drop.load_state_dict({name: torch.zeros_like(value) for name, value in layer.state_dict().items()})
    assert not layer.linear.weight.any()
    drop.eval()
    drop(x)
    assert layer.seen[-1] == LENGTH


def train(folder: str, stage: int) -> dict[str, Any]:
    engine = engine_of(stage=stage)
    names = sorted(engine.optimizer.full_state_dict())
    first = losses(engine, 2)
    engine.save_checkpoint(folder)
    rest = losses(engine, 4, 2)
    state, seen = engine.random_ltd_scheduler.state_dict(), [layer_of(layer).seen for layer in engine.module.layers]
    weights = digest(engine.optimizer.full_state_dict())
    engine.destroy()

    engine = engine_of(recompute=True, stage=stage)
    engine.load_checkpoint(folder)
    again = losses(engine, 4, 2)
    same = engine.random_ltd_scheduler.state_dict() == state
    resumed = digest(engine.optimizer.full_state_dict())
    engine.destroy()
    return {
        "names": names,
        "losses": first + rest,
        "resumed": (again == rest, same, resumed == weights),
        "seen": seen,
        "value": state["current_value"],
        "weights": weights,
    }


def layer_of(layer: Any) -> Any:
    return layer.random_ltd_layer if isinstance(layer, RandomLayerTokenDrop) else layer


@pytest.mark.parametrize("stage", [1, 3])
def test_engine_ranks_recomputation_and_resume(run_ranks: Run, tmp_path: Path, stage: int) -> None:
    first, second = run_ranks(train, 2, str(tmp_path), stage)
    for result in (first, second):
        assert result["resumed"] == (True, True, True)  # with recomputed blocks, too
        assert result["seen"] == [[12] * 6, *[[4, 6, 8, 10, 12, 12]] * 2, [12] * 6]  # the same number on all ranks
        assert result["names"] == sorted(Stack().state_dict())
    assert first["weights"] == second["weights"] and first["losses"] != second["losses"]


def test_errors(world_of_one: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r'random_ltd_layer_num" is missing'):
        zcomm.initialize(model=Stack(), config=config(random_ltd_layer_num=None))
    with pytest.raises(NotImplementedError, match=r"layer_token_lr_schedule\.enabled"):
        zcomm.initialize(model=Stack(), config=config(layer_token_lr_schedule={"enabled": True}))
    with pytest.raises(ValueError, match=r'"data_efficiency.data_routing.random_ltd.enabled": true needs'):
        zcomm.initialize(
            model=Stack(), config=config() | {"data_efficiency": {"data_routing": {"random_ltd": {"enabled": True}}}}
        )
    engine = zcomm.initialize(model=Stack(), config=config(random_ltd_layer_id=[1, 7]))[0]
    with caplog.at_level("WARNING", "zcomm"):
        losses(engine, 1)
    assert "no layer drops tokens" in caplog.text
    with pytest.raises(ValueError, match=r"random_ltd_layer_id has \[1, 7\], .* have the numbers \[0, 1, 2, 3\]"):
        convert_to_random_ltd(engine, Mixer)
    engine.destroy()
    engine = zcomm.initialize(model=Stack(), config={"train_batch_size": 2})[0]
    with pytest.raises(RuntimeError, match="is not enabled"):
        convert_to_random_ltd(engine, Mixer)
    engine.destroy()
