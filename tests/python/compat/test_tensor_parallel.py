"""Tensor parallelism by DeepSpeed's names: ``tensor_parallel.autotp_size`` and ``tp_model_init``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcomm

Run = Callable[..., list[Any]]
WIDTH, HEADS = 8, 2


class Block(nn.Module):
    """Attention that keeps its number of heads, and an MLP, by names that a plan is found for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out_proj = nn.Linear(WIDTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        heads = [
            f(x).view(rows, tokens, self.num_heads, WIDTH // HEADS).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(rows, tokens, -1)
        x = x + self.out_proj(mixed)
        out: torch.Tensor = x + self.fc2(torch.tanh(self.fc1(x)))
        return out


class Net(nn.Module):
    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        if odd:
            self.layers[1].router = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - wanted).square().mean()


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, WIDTH, generator=made), torch.randn(2, 3, WIDTH, generator=made)


def trained(way: str) -> float:
    """Return the greatest difference of losses from the whole model on one rank."""
    import zcomm.compat.deepspeed as deepspeed
    from zcomm.compat.deepspeed.runtime import utils  # noqa: F401
    from zcomm.compat.deepspeed.utils import groups

    model: Any = Net()
    alone = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2},
    }
    optimizer = None
    if way == "instance":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}}
    if way == "tp_model_init":
        deepspeed.set_autotp_mode(training=True)
        model = deepspeed.tp_model_init(model, tp_size=2, dtype=torch.float32, config=config)
        config.pop("tensor_parallel")
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config
    )
    assert sum(isinstance(param, DTensor) for param in model.parameters()) == 24
    data, place = engine.comm.world_size // 2, engine.comm.rank // 2
    for group in (groups.get_tensor_model_parallel_group(), groups.get_model_parallel_group()):
        assert torch.distributed.get_process_group_ranks(group) == [2 * place, 2 * place + 1]
    assert torch.distributed.get_world_size(engine.data_parallel_group) == engine.dp_world_size == data
    assert engine.autotp_size() == config.get("tensor_parallel", {}).get("autotp_size", 0)
    assert deepspeed.runtime.utils.is_model_parallel_parameter(next(iter(model.parameters())))
    reference, worst = torch.optim.AdamW(alone.parameters(), lr=0.01, weight_decay=0.0), 0.0
    for step in range(3):
        reference.zero_grad()
        for micro in range(2):
            first = (2 * step + micro) * data
            loss = engine(*batch(first + place))
            engine.backward(loss)
            engine.step()
            worst = max(worst, abs(loss.item() - alone(*batch(first + place)).item()))
            for number in range(first, first + data):
                (alone(*batch(number)) / data / 2).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        reference.step()
    engine.destroy()
    torch.distributed.destroy_process_group()
    return worst


def refused() -> list[str]:
    import zcomm.compat.deepspeed as deepspeed

    found = []
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (Net(odd=True), {"tensor_parallel": {"autotp_size": 2}}),
        (nn.Sequential(nn.Linear(4, 4)), {"tensor_parallel": {"autotp_size": 2}}),
        (Net(), {"tensor_parallel": {"autotp_size": 3}}),
        (Net(), {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}}),
    ]
    for model, keys in cases:
        try:
            deepspeed.initialize(model=model, config=base | keys)
            found.append("nothing")
        except (ValueError, NotImplementedError) as error:
            found.append(str(error))
    torch.distributed.destroy_process_group()
    zcomm.shutdown()
    return found


@pytest.mark.parametrize(
    ("way", "ranks"), [("instance", 2), ("tp_model_init", 2), pytest.param("json", 4, marks=pytest.mark.slow)]
)
def test_a_model_is_divided_as_the_configuration_asks(run_ranks: Run, way: str, ranks: int) -> None:
    assert max(run_ranks(trained, ranks, way)) < 1e-5


def test_a_model_without_a_plan_is_named(run_ranks: Run) -> None:
    for found in run_ranks(refused, 2):
        assert "none can be found for layers.1.router (Linear of 1)" in found[0], found
        assert "Sequential has no plan for tensor parallelism" in found[1]
        assert '"autotp_size": 3} does not divide the 2 ranks' in found[2]
        assert "3 with the DTensor layers.0.q_proj.weight" in found[3]
