"""Edits of weights in forward: all ranks raise if one depends on a rank's batch; other edits act as in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import simulated
import zcomm

Run = Callable[..., list[Any]]
SETTINGS: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1, "share_parameters": False}, {"stage": 2}, {"stage": 3}]
UNITS: dict[str, Any] = {"stage": 3, "share_parameters": False}
NVME: dict[str, Any] = {"stage": 3, "offload": "nvme", "prefetch": 0}


class Rescaled(nn.Module):
    """Rescales the batch's rows of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 4), 2.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight, max_norm=1.0)


class Clipped(nn.Module):
    """Clips its weight, which does not depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.5, 0.5)
        return F.embedding(ids, self.weight)


def ids_of(rank: int) -> torch.Tensor:
    return torch.tensor([[0, 1, 4, 5], [2, 3, 6, 7]][rank])


def error_of(make: Callable[[], nn.Module], setting: dict[str, Any], alone: int | None = None) -> str:
    """Return the error of construction or of the first step. The last argument: a rank with one more forward."""
    opt = None
    try:
        model = make()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **setting)
        model(ids_of(zcomm.rank()) if alone is None else torch.empty(0, dtype=torch.int64)).sum().backward()
        if alone == zcomm.rank():
            model(ids_of(0))
        opt.step()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if opt is not None:
            opt.close()
    return ""


def refused(folder: str) -> list[str]:
    wrong = []
    zcomm.init(timeout=60)
    for setting in [*SETTINGS, UNITS]:
        for kind in (nn.Embedding, nn.EmbeddingBag):
            error = error_of(lambda kind=kind: nn.Sequential(kind(8, 4, max_norm=1.0)), setting)
            if (
                not error.startswith("ValueError: 0 has max_norm=1.0")
                or "torch.renorm(e.weight, 2, 0, 1.0)" not in error
            ):
                wrong.append(f"{kind.__name__}, {setting}: {error}")
        error = error_of(Rescaled, setting)
        if "RuntimeError" not in error or "weight" not in error or "max_norm" not in error:
            wrong.append(f"functional, {setting}: {error}")
    for setting in (UNITS, {**NVME, "nvme_path": folder}):
        error = error_of(lambda: nn.Sequential(Rescaled()), setting)
        if not error.startswith("RuntimeError: 0.weight was changed while its module ran"):
            wrong.append(f"functional in a module, {setting}: {error}")
    for setting in SETTINGS:
        error = error_of(Rescaled, setting, alone=1)
        if "forward has edited weights" not in error:
            wrong.append(f"on one rank, {setting}: {error}")
    return wrong


def test_edits_that_depend_on_the_batch_are_refused(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(refused, 2, str(tmp_path)) == [[], []]


def test_edits_on_devices_that_depend_on_the_batch_are_refused(run_ranks: Run) -> None:
    for error in run_ranks(simulated.on_device, 2, 1, error_of, Rescaled, {"stage": 2, "offload": "cpu"}):
        assert "forward has edited weights" in error


def clipped() -> list[str]:
    """Compare the ranks' weights with one process's, after two steps with the mean of the ranks' gradients."""
    comm = zcomm.init(timeout=60)
    plain = Clipped()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        sum(plain(ids_of(rank)).square().sum() for rank in range(comm.world_size)).div(comm.world_size).backward()
        sgd.step()
        sgd.zero_grad()
    wrong = []
    for setting in SETTINGS:
        model = Clipped()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **setting)
        for _ in range(2):
            model(ids_of(comm.rank)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        if not torch.allclose(model.weight, plain.weight, rtol=0, atol=1e-6):
            wrong.append(str(setting))
        opt.close()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_that_do_not_depend_on_the_batch_count_once(run_ranks: Run, world_size: int) -> None:
    assert run_ranks(clipped, world_size) == [[]] * world_size


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(8, 4, max_norm=1.0)
        self.blocks = nn.ModuleList(nn.Embedding(9, 4, max_norm=0.7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + sum(block(x) for block in self.blocks)


@pytest.mark.parametrize("setting", [*SETTINGS, NVME], ids=str)
def test_a_rank_that_is_alone_keeps_max_norm(world_of_one: None, tmp_path: Path, setting: dict[str, Any]) -> None:
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Renormed()
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            opt = zcomm.ZeroOptimizer(model, opt, nvme_path=tmp_path, **setting)
        for rank in (0, 1, 0):
            model(ids_of(rank)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict() if sharded else model.state_dict())
        if sharded:
            opt.close()
    torch.testing.assert_close(ends[1], dict(ends[0]), rtol=1e-5, atol=1e-6)
