"""Stage 3 by units where backward leaves or enters a unit otherwise than by its module's outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, BLOCKS = 16, 7
PRIVATE = Case(3, None, 0.02, share_parameters=False, prefetch=0)
CASES = [Case(2), PRIVATE, Case(3, "nvme", 0.02, prefetch=1)]


class Block(nn.Module):
    """``unused``: a bias that no loss depends on, as of an expert without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def input_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


LOSSES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {"plain": plain}


def train(case: Case, folder: str, kind: str, steps: int = 3) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    net = made()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    opt = zcomm.ZeroOptimizer(net, sgd, nvme_path=folder, **case.arguments())
    losses = []
    for step in range(steps):
        loss = LOSSES[kind](net, input_of(comm.rank, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    slots = len(getattr(opt._live.store, "_slots", ()))
    weights = opt.full_state_dict()
    opt.close()
    return {"bits": (losses, digest(weights)), "weights": weights, "slots": slots}


def train_cases(folder: str, kind: str) -> list[dict[str, Any]]:
    return [train(case, folder, kind) for case in CASES]


def by_torch(kind: str, world_size: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """The same training in one process without zcomm."""
    net = made()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(world_size):
            (LOSSES[kind](net, input_of(rank, step)) / world_size).backward()
        sgd.step()
        sgd.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", LOSSES)
def test_the_same_bits_and_torchs_numbers(run_ranks: Run, tmp_path: Path, kind: str, world_size: int) -> None:
    want = by_torch(kind, world_size)
    for results in run_ranks(train_cases, world_size, str(tmp_path), kind):
        for case, result in zip(CASES, results, strict=True):
            assert result["bits"] == results[0]["bits"], f"{kind} of {case}: other bits"
            for name, value in want.items():
                torch.testing.assert_close(result["weights"][name], value, rtol=1e-5, atol=1e-6, msg=f"{kind}: {name}")
            if case.stage == 3:
                assert result["slots"] <= case.prefetch + 2, f"{kind}: the ring has grown"
