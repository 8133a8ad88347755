"""Integer parameters (quantised weights under trained adapters): whole on each rank, logged once, counted, saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.planning import estimate

Run = Callable[..., list[Any]]


class Quantised(nn.Module):
    """A Linear of int8 codes and a scale, next to a trained low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        codes = torch.randint(-99, 99, (64, 64), dtype=torch.int8, generator=generator)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.full((64, 1), 1e-3), requires_grad=False)
        self.down = nn.Linear(64, 4, bias=False)
        self.up = nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.codes.to(x.dtype) * self.scale
        return x + torch.tanh(x @ weight.t()) + self.up(self.down(x))


def made() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(*(Quantised() for _ in range(4)))


def train(folder: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for stage, offload in ((0, None), (2, "cpu"), (3, None), (3, "nvme")):
        net = made()
        opt = zcomm.ZeroOptimizer(net, stage=stage, offload=offload, nvme_path=folder, lr=1e-2)
        memory, planned = opt.memory(), estimate(made(), stage, offload, comm.world_size).memory
        for step in range(3):
            net(torch.full((2, 64), 0.1 * step + comm.rank)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.save(f"{folder}/saved")
        with torch.no_grad():
            for block in net:
                block.codes.zero_()
        opt.load(f"{folder}/saved")
        weights = opt.full_state_dict()
        assert torch.equal(weights["2.codes"], made()[2].codes), "saved, loaded and given with the others"
        found.append((memory == planned, {name: value.tolist() for name, value in weights.items()}))
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_adapters_train_over_integers(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train, world_size, str(tmp_path)):
        for planned, weights in found:
            assert planned, "every byte is planned"
            assert weights == found[0][1]


def test_they_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for stage in (2, 3):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zcomm"):
            zcomm.ZeroOptimizer(made(), stage=stage).close()
        said = [record.getMessage() for record in caplog.records]
        assert len(said) == (stage == 3)
        assert stage < 3 or said[0].startswith(
            "stage 3: 0.codes, 1.codes, 2.codes, 3.codes, of integers, stay whole on each rank (0.0 MiB)"
        )
    zcomm.shutdown()
