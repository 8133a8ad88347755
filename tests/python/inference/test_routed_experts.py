"""Experts of a streamed model: only the matrices of routed experts are read, with the numbers of the resident model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zcomm
from zcomm.inference import stream, streamed

Run = Callable[..., list[Any]]
WIDTH, INNER, COUNT, CHOSEN, BLOCKS = 64, 128, 8, 2, 3


class Experts(nn.Module):
    """Experts as transformers has them: weights of three dimensions, indexed by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = COUNT
        self.up = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) / 8)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 8)
        self.kept: list[torch.Tensor] | None = None
        self.act: Any = None

    def forward(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        if self.act is not None:
            return y + self.act(self)
        for expert in top_k_index.unique():
            token, place = torch.where(top_k_index == expert)
            up, down = self.up[expert], self.down[expert]
            y.index_add_(
                0, token, top_k_weights[token, place, None] * F.linear(torch.tanh(F.linear(x[token], up)), down)
            )
            if self.kept is not None:
                self.kept = [up, down]
        return y


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, COUNT), Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.tanh(self.mix(x))
        weights, index = self.router(x).softmax(-1).topk(CHOSEN, -1)
        return x + self.experts(x, top_k_index=index, top_k_weights=weights)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def inputs(seed: int, count: int = 1) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def check(net: nn.Module, want: nn.Module, count: int = 1, first: int = 0) -> None:
    with torch.no_grad():
        for seed in range(first, first + 4):
            assert torch.equal(net(inputs(seed, count)), want(inputs(seed, count)))


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("count", [1, 5])
def test_only_routed_experts_are_read(tmp_path: Path, quantize: Any, count: int) -> None:
    want, net = Net(), stream(Net(), "nvme", quantize, folder=tmp_path)
    found = streamed(net)
    if quantize:
        want.load_state_dict(net.state_dict())
    check(net, want, count)
    before, routes = found.stats(), list[int]()
    for block in want.blocks:
        block.experts.register_forward_pre_hook(
            lambda _, args, kwargs: routes.append(len(kwargs["top_k_index"].unique())), with_kwargs=True
        )
    check(net, want, count, first=4)
    after = found.stats()
    routed = after["routed_nbytes"] - before["routed_nbytes"]
    if quantize is None:
        assert routed == sum(routes) * 2 * WIDTH * INNER * 2
    assert after["read_nbytes"] - before["read_nbytes"] == 4 * found.pass_nbytes + routed
    assert sum(routes) < 4 * BLOCKS * COUNT
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in net.state_dict().items())


def test_edits_copies_and_gradients_of_inputs(tmp_path: Path) -> None:
    want, net = Net(), stream(Net(), "nvme", folder=tmp_path)
    check(net, want)
    with torch.no_grad():
        for model in (want, net):
            model.blocks[1].experts.up.mul_(2)
            model.blocks[2].experts.down[3].fill_(0.5)
    check(net, want, 5)
    check(copy.deepcopy(net), want)
    grads = []
    for model in (want, net):
        x = inputs(1, 4).requires_grad_()
        model(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(grads[0], grads[1])
    streamed(net).close()
    check(net, want)


def test_a_matrix_that_is_kept_keeps_its_values_and_takes_no_writes(tmp_path: Path) -> None:
    want, net = Net(), stream(Net(), "nvme", folder=tmp_path)
    for block in (*want.blocks, *net.blocks):
        block.experts.kept = []
    check(net, want)
    kept = [
        (a, b)
        for one, other in zip(net.blocks, want.blocks, strict=True)
        for a, b in zip(one.experts.kept, other.experts.kept, strict=True)
    ]
    check(net, want, 5, first=4)
    assert all(torch.equal(a, b) for a, b in kept)
    with pytest.raises(RuntimeError, match="inference"):
        kept[0][0].mul_(2)


def test_other_uses_in_forward(tmp_path: Path) -> None:
    """Numbers, tensors of numbers and whole weights; an index that is out of range."""
    want, net = Net(), stream(Net(), "nvme", folder=tmp_path)
    index = torch.tensor([3, 0, 3, -1])
    acts = (
        lambda it: it.up[3].sum(),
        lambda it: it.down[index].sum((1, 2)).mean(),
        lambda it: it.up.sum(),
        lambda it: it.up[1:3].sum(),
        lambda it: it.up[torch.arange(COUNT) > 4].sum(),
    )
    for act in acts:
        for model in (want, net):
            model.blocks[1].experts.act = act
        check(net, want)
    net.blocks[1].experts.act = lambda it: it.up[COUNT]
    with pytest.raises(IndexError, match=r"blocks\.1\.experts\.up.*8 matrices"), torch.no_grad():
        net(inputs(0))
    net.blocks[1].experts.act = want.blocks[1].experts.act = None
    check(net, want)


def test_a_limit_on_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = importlib.import_module("zcomm.zero.memory.limit")
    monkeypatch.setattr(limit, "_resident_nbytes", lambda: 0)
    monkeypatch.setattr(limit, "_FIRST_PASS_NBYTES", 0)
    want, net = Net(), stream(Net(), "nvme", memory="4MiB", folder=tmp_path)
    check(net, want, 3)
    memory = streamed(net)._store.memory
    assert memory.rows.matrices.nbytes <= 6 * WIDTH * INNER * 2
    net(inputs(0))  # with gradients enabled
    check(net, want)


def on_ranks(folder: str) -> None:
    comm = zcomm.init()
    net, want = stream(Net(), "nvme", folder=folder), Net()
    check(net, want, 1 + comm.rank, first=comm.rank)
    assert streamed(net).stats()["routed_nbytes"] == 0
    streamed(net).close()


def test_ranks_gather_all_experts(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, str(tmp_path))
