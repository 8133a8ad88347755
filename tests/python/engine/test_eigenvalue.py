"""Eigenvalue: against torch.linalg on the whole Hessian, over ranks, and that training keeps its bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.engine.eigenvalue import Eigenvalue, summary_events
from zero_jobs import digest

Run = Callable[..., list[Any]]
BLOCKS = 3


class Net(nn.Module):
    """Three blocks; the last one has a parameter that the loss does not need."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(BLOCKS))
        self.blocks[2].unused = nn.Parameter(torch.ones(3))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum(-1).mean() * 50


def samples(rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def by_linalg(x: torch.Tensor) -> list[float]:
    """Return each block's eigenvalue of the largest absolute value, over the largest of them."""
    net, found = Net(), []
    for number in range(BLOCKS):
        linear = net.blocks[number][0]

        def loss(flat: torch.Tensor, linear: Any = linear) -> torch.Tensor:
            weights = {"weight": flat[:16].view(4, 4), "bias": flat[16:]}
            y = x
            for block in net.blocks:
                y = torch.func.functional_call(linear, weights, (y,)) if block[0] is linear else block[0](y)
                y = y.tanh()
            return y.square().sum(-1).mean() * 50

        flat = torch.cat([linear.weight.detach().flatten(), linear.bias.detach()])
        values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, flat))
        found.append(float(values[values.abs().argmax()]))
    largest = max(map(abs, found))
    return [abs(value) / largest for value in found]


def exact(**more: Any) -> Eigenvalue:
    return Eigenvalue(layer_name="blocks", layer_num=BLOCKS, max_iter=2000, tol=1e-12, **more)


def of_blocks(found: dict[int, tuple[float, int]], net: nn.Module) -> list[float]:
    for number, block in enumerate(net.blocks):  # type: ignore[arg-type]
        assert len({found[id(param)] for param in block.parameters()}) == 1
        assert all(found[id(param)][1] == number for param in block.parameters())
    return [found[id(next(block.parameters()))][0] for block in net.blocks]  # type: ignore[union-attr]


def test_values_of_the_whole_hessian() -> None:
    net, x = Net(), samples(0)
    expected = pytest.approx(by_linalg(x), rel=1e-6)
    assert of_blocks(exact().of_loss(net(x), net), net) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle that create_graph makes
        (net(x) * 8).backward(create_graph=True)  # DeepSpeed's way, with a loss scale
    assert of_blocks(exact().compute_eigenvalue(net, scale=8.0), net) == expected
    net.zero_grad()


def test_no_graph_no_curvature_and_wrong_names(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net(samples(0)).backward()
    assert exact().compute_eigenvalue(net) == {} and "create_graph=True" in caplog.text
    linear = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 1)])})
    only = Eigenvalue(layer_name="blocks", layer_num=1)
    found = only.of_loss(linear["blocks"][0](torch.ones(1, 2)).sum(), linear)  # type: ignore[index]
    assert {value for value, _ in found.values()} == {1.0}  # as for a value that fp16 rounds to 0
    assert only.post_process([-4.0, 0.0, 2.0]) == [1.0, 1.0, 0.5]
    with pytest.raises(ValueError, match="has 1 blocks, not 3"):
        exact().get_layers(linear)
    with pytest.raises(ValueError, match="is not a list of modules"):
        exact().get_layers(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must name a list of blocks"):
        Eigenvalue(layer_name="blocks")


def test_events() -> None:
    assert summary_events({"a": (1.25, 0), "b": (0.5, 1)}, 128) == [
        ("Train/Eigenvalues/ModelBlockParam_0", 1.25, 128),
        ("Train/Eigenvalues/ModelBlockParam_1", 0.5, 128),
    ]


def train(stage: int, section: dict[str, Any] | None) -> tuple[str, list[list[float]]]:
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    net = Net(torch.float32)
    engine = zcomm.initialize(model=net, config=config | ({"eigenvalue": section} if section else {}))[0]
    seen = []
    for _ in range(6):
        engine.backward(engine(samples(engine.global_rank, torch.float32)))
        seen.append(of_blocks(engine.block_eigenvalue, net) if engine.block_eigenvalue else [])
        engine.step()
    weights = digest(engine.optimizer.full_state_dict())
    engine.destroy()
    return weights, seen


def compare() -> list[tuple[str, list[list[float]]]]:
    section = {"enabled": True, "max_iter": 500, "tol": 1e-6, "layer_name": "blocks", "layer_num": 3}
    section["gas_boundary_resolution"] = 2
    return [train(1, None), *(train(stage, section) for stage in (0, 1, 2))]


def test_engine_over_ranks(run_ranks: Run) -> None:
    first, second = run_ranks(compare, 2)
    assert first == second  # the values of all ranks' samples, and the same weights
    plain, *others = first
    expected = by_linalg(torch.cat([samples(0), samples(1)]))
    for weights, seen in others:
        assert weights == plain[0]
        assert seen[0] == [] and seen[1] == seen[2] == seen[4] != seen[5]  # in steps 0 and 2, at their last micro-step
        assert seen[1] == pytest.approx(expected, rel=1e-3)


def test_refusals(world_of_one: None) -> None:
    section = {"enabled": True, "layer_name": "blocks", "layer_num": 3}
    config = {"train_batch_size": 1, "eigenvalue": section}
    with pytest.raises(NotImplementedError, match="a product with the Hessian"):
        zcomm.initialize(model=Net(torch.float32), config=config | {"zero_optimization": {"stage": 3}})
    with pytest.raises(ValueError, match="has 3 blocks, not 4"):
        zcomm.initialize(model=Net(torch.float32), config=config | {"eigenvalue": section | {"layer_num": 4}})


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_an_operation_without_a_second_derivative() -> None:
    net = Net()
    with pytest.raises(RuntimeError, match="block 0 of blocks has an operation without a second derivative"):
        exact().of_loss(Once.apply(net.blocks[0](samples(0))).square().sum(), net)
