"""Failures in the middle of training: a killed rank, ranks with different models, files that a killed run leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from tiers import slow
from zero_jobs import batch, loss_of, small_gpt

Run = Callable[..., list[Any]]
SUMS = zcomm.Offload("nvme", "nvme", gradients="nvme", update="step")
WAITS = zcomm.Offload("nvme", "nvme", gradients="nvme", update="forward")


def train_until_lost(folder: str, stage: int, offload: Any) -> float:
    """Train until PeerLost; returns the time of the error on the clock that all processes share."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, stage=stage, offload=offload, nvme_path=f"{folder}/swap", bucket_mb=0.02)
    try:
        for number in range(10**6):
            loss_of(model, *batch(comm.rank, number)).backward()
            opt.step()
            opt.zero_grad()
            if number == 3:
                Path(folder, f"trains{comm.rank}").touch()
    except zcomm.PeerLost as error:
        noticed = time.monotonic()
        assert error.rank == 1, f"named rank {error.rank}: {error}"
        assert "rank 1" in str(error)
        with pytest.raises(zcomm.PeerLost, match="rank 1"):  # poisoned: later calls raise it, too
            opt._live.comm.barrier()
        return noticed
    raise AssertionError("nothing happened")


@pytest.mark.leaves_swap
@pytest.mark.parametrize(
    ("stage", "offload"), [slow(0, None), slow(2, "cpu"), (3, None), slow(3, "nvme"), slow(3, SUMS), (3, WAITS)]
)
def test_kill_9_in_training(start_ranks_in: Any, tmp_path: Path, stage: int, offload: Any) -> None:
    world = start_ranks_in(train_until_lost, 3, str(tmp_path), stage, offload)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"trains{rank}").exists() for rank in range(3)):
        if time.monotonic() > deadline:
            pytest.fail("\n".join(result.describe() for result in world.join(0.1)))  # with stacks
        time.sleep(0.01)
    killed = world.kill(1)
    results = world.join(60)
    assert results[1].exitcode == -9
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].describe()
        assert results[rank].value - killed < 15.0, f"rank {rank} took {results[rank].value - killed:.2f} s"
    if stage == 3 and offload is not None:
        swap = tmp_path / "swap"
        left = list(swap.glob("zcomm-swap-*"))
        assert len(left) == 1, "the survivors removed theirs, the killed rank could not"
        assert [path.name for path in left[0].iterdir()] == ["lock"], "its data have no name: their space is free"
        zcomm.SwapFile(str(swap)).close()
        assert not list(swap.glob("zcomm-swap-*")), "the next start removes what a killed run left"


def different_models(wide_rank: int) -> None:
    comm = zcomm.init(timeout=30)
    width = 96 if comm.rank == wide_rank else 48
    zcomm.ZeroOptimizer(torch.nn.Linear(48, width, bias=False), stage=2)


def test_different_models_are_refused_everywhere(run_ranks: Run) -> None:
    for result in run_ranks(different_models, 3, 2, check=False):
        assert result.error is not None and "ValueError" in result.error.kinds, result.describe()
        assert "rank 2: parameter weight is [96, 48], group 0, not [48, 48]" in result.error.message


def different_order() -> None:
    """Rank 1 runs its blocks backwards: by-unit gathers must name both units."""
    comm = zcomm.init(timeout=30)
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks if comm.rank == 0 else reversed(self.blocks):
                x = block(x)
            return x

    net = Net()
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, prefetch=0)
    net(torch.ones(1, 32)).sum().backward()
    opt.step()


def test_different_order_of_units_is_an_error_not_a_hang(run_ranks: Run) -> None:
    for result in run_ranks(different_order, 2, check=False):
        assert result.error is not None and "CollectiveMismatch" in result.error.kinds, result.describe()
        assert "blocks.0" in result.error.message and "blocks.3" in result.error.message
