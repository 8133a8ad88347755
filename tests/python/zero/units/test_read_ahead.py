"""Read-ahead after a step: the first units of the next forward are gathered, and edits in between take effect."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero.units.unit import UnitState
from zero_jobs import digest

Run = Callable[..., list[Any]]
WIDTH, BLOCKS = 16, 6
DRIVE = zcomm.Offload("nvme", "nvme", update="step")  # a forward that updates is not read ahead


class Net(nn.Module):
    """Blocks, and a root unit next to them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        x = self.first(x)
        for block in reversed(self.blocks) if backwards else self.blocks:
            x = block(x)
        return x


def made(folder: str, offload: str | zcomm.Offload | None, prefetch: int = 1) -> tuple[Net, zcomm.ZeroOptimizer]:
    zcomm.init(timeout=60)
    net = Net()
    opt = zcomm.ZeroOptimizer(
        net,
        "adamw",
        lr=1e-2,
        stage=3,
        offload=offload,
        nvme_path=folder if offload else None,
        prefetch=prefetch,
        share_parameters=False,
        bucket_mb=0.001,
    )
    return net, opt


def step(net: Net, opt: zcomm.ZeroOptimizer, number: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    net(x).square().sum().backward()
    opt.step()
    opt.zero_grad()


def ahead(folder: str, prefetch: int) -> list[list[str]]:
    """Return the units that have memory after each step."""
    net, opt = made(folder, DRIVE, prefetch)
    found = []
    for number in range(3):
        step(net, opt, number)
        units: Any = opt._live.store.units
        found.append([unit.name for unit in units if unit.state is not UnitState.SHARDED])
    opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prefetch", [slow(0), 1, slow(2)])
def test_the_first_units_are_on_their_way(run_ranks: Run, tmp_path: Path, world_size: int, prefetch: int) -> None:
    wanted = ["root", *(f"blocks.{number}" for number in range(prefetch))]
    for found in run_ranks(ahead, world_size, str(tmp_path), prefetch):
        assert found == [wanted] * 3


def between(folder: str, offload: str | None, checkpoint: str) -> str:
    """Train; between steps edit, set, evaluate, save and load. Return the bits."""
    net, opt = made(folder, offload)
    step(net, opt, 0)
    with torch.no_grad():
        net.blocks[0][0].weight.mul_(0.5)
        net.first.weight.mul_(2.0)
    step(net, opt, 1)
    found = [net(torch.ones(2, WIDTH), backwards=True).detach().clone()]
    step(net, opt, 2)
    opt.save(checkpoint)
    found.append(zcomm.zero.full_param(net.blocks[0][0].bias))
    step(net, opt, 3)
    opt.load(checkpoint)
    step(net, opt, 4)
    with torch.no_grad(), zcomm.zero.GatheredParameters(list(net.parameters())):
        found.append(net(torch.ones(2, WIDTH)).clone())
    values = {name: 0.5 * value for name, value in opt.full_state_dict().items()}
    net.load_state_dict(values)
    step(net, opt, 5)
    bits = digest({**opt.full_state_dict(), **{str(number): value for number, value in enumerate(found)}})
    step(net, opt, 6)
    opt.close()
    return bits


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_happens_between_steps_counts(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    on_drive = run_ranks(between, world_size, str(tmp_path), "nvme", str(tmp_path / "on_drive"))
    in_ram = run_ranks(between, world_size, str(tmp_path), None, str(tmp_path / "in_ram"))
    assert len({*on_drive, *in_ram}) == 1


def failing(folder: str, checkpoint: str, fails: bool, loads: bool) -> str:
    """Train with a read ahead that fails once; continue with the next forward, or with a checkpoint."""
    net, opt = made(folder, DRIVE)
    step(net, opt, 0)
    opt.save(checkpoint)
    source: Any = opt._live.store.source
    fetch, armed = source.fetch, [False]

    def refused(bucket: Any, out: torch.Tensor) -> Any:
        if armed[0]:
            armed[0] = False
            raise OSError(errno.EIO, f"bucket {bucket.index}")
        return fetch(bucket, out)

    source.fetch = refused
    spread = opt._live.store.spread

    def arm() -> None:
        spread()
        armed[0] = fails

    opt._live.store.spread = arm  # type: ignore[method-assign]
    step(net, opt, 1)
    opt._live.store.spread = spread  # type: ignore[method-assign]
    if loads:
        opt._live.store.gather.synchronize()  # otherwise a read of load() may be refused
        opt.load(checkpoint)
    elif fails:
        with pytest.raises(OSError, match="bucket"):
            net(torch.ones(2, WIDTH))
    assert not armed[0]
    step(net, opt, 2)
    bits = digest(opt.full_state_dict())
    opt.close()
    return bits


@pytest.mark.parametrize("loads", [False, True])
def test_a_read_ahead_that_failed_is_an_error_where_it_is_wanted(run_ranks: Run, tmp_path: Path, loads: bool) -> None:
    bits = [
        run_ranks(failing, 1, str(tmp_path), str(tmp_path / f"saved.{fails}"), fails, loads) for fails in (False, True)
    ]
    assert bits[0] == bits[1]
