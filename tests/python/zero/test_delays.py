"""Random sleeps at each hook, event and stream, for 200 steps, leave the bits unchanged: no result depends on luck."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from delays import Clock, Late, LateSwap, sleepy
from tiers import long
from zcomm.zero.cache.swap import NoSwap
from zero_jobs import Case, digest

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
STEPS = 200
SMALL = 0.002  # MiB: buckets of one or two tensors, so that slots are reused


class Net(nn.Module):
    """Blocks of one shape (units), a weight used twice, and a block's parameter read outside of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)) for _ in range(4))
        self.last = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == 1:
                x = x + x @ self.blocks[3][0].weight * 0.1
        return self.last(x)


def train(case: Case, folder: str, steps: int) -> str:
    comm = zcomm.init(timeout=60)
    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4  # more spans than windows
    accum = 2 if case.stage == 1 else 1
    torch.manual_seed(5)
    net = Net()
    opt = zcomm.ZeroOptimizer(
        net, "adamw", lr=1e-2, clip_norm=1.0, grad_accum=accum, nvme_path=folder, **case.arguments()
    )
    lag(opt)
    sums = []
    for step in range(steps):
        for micro in range(accum):
            x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + 2 * comm.rank + micro))
            loss = net(x.to(opt.precision.dtype)).float().square().mean()
            loss.backward()
            sums.append(loss.item())
            opt.step()
            opt.zero_grad()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    bits = digest({**opt.full_state_dict(), **arrays, "losses": torch.tensor(sums, dtype=torch.float64)})
    opt.close()
    return bits


clock: Clock | None = None


def lag(opt: Any) -> None:
    """Delay the streams of an optimizer if delays are on."""
    if clock is None:
        return
    parts = opt._live
    for comm in (parts.comm, getattr(getattr(parts.store, "gather", None), "comm", None)):
        if comm is not None:
            comm._core = Late(comm._core, clock)
    if not isinstance(parts.swap, NoSwap):
        parts.swap = LateSwap(parts.swap, clock)
        sources = parts.store.source.drives if hasattr(parts.store, "source") else []
        for drive in (*parts.state.drives, *sources):
            drive._cache._swap = parts.swap


def lag_hooks() -> None:
    """Delay hooks and waits of every optimizer from now on."""
    from zcomm.zero.cache.span_cache import SpanCache
    from zcomm.zero.gradients.host import HostTransport
    from zcomm.zero.gradients.reducer import GradientReducer
    from zcomm.zero.optim_state.ram import ShardState
    from zcomm.zero.params.stores import HostStore
    from zcomm.zero.units.gather import ShardGather
    from zcomm.zero.units.hooks import UnitHooks
    from zcomm.zero.units.life import UnitManager
    from zcomm.zero.units.store import UnitStore

    assert clock is not None
    sleepy(GradientReducer, ["_collect", "_launch", "_end_pass"], clock)
    sleepy(HostTransport, ["wait", "put"], clock)
    sleepy(UnitManager, ["ensure", "use", "drop", "begin_pass", "reached"], clock)
    sleepy(ShardGather, ["fill"], clock)
    sleepy(UnitStore, ["publish"], clock)
    sleepy(UnitHooks, ["_begin", "_end_backward"], clock)
    sleepy(HostStore, ["load"], clock)
    sleepy(SpanCache, ["prefetch", "edit", "write", "_vacate"], clock)
    sleepy(ShardState, ["_step_tile"], clock)


def with_and_without(cases: list[Case], folder: str, steps: int) -> list[tuple[str, str, int]]:
    """Return for each case: bits without delays, with delays, and the number of sleeps."""
    global clock
    plain = [train(case, folder, steps) for case in cases]
    clock = Clock(zcomm.rank())
    lag_hooks()
    found = []
    for case, bits in zip(cases, plain, strict=True):
        before = clock.slept
        found.append((bits, train(case, folder, steps), clock.slept - before))
    return found


CASES = [
    Case(0, None, SMALL),
    Case(1, "nvme", SMALL, fraction=0.5),
    Case(2, None, SMALL, share_parameters=False),
    Case(3, None, SMALL, share_parameters=False, prefetch=2),
    Case(3, "nvme", SMALL, precision="bf16"),
]


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("world_size", "cases"), [(2, CASES[3:]), (3, CASES[2:3]), long(2, CASES[:3])])
def test_delays_change_no_bit(run_ranks: Run, tmp_path: Path, world_size: int, cases: list[Case]) -> None:
    per_rank = run_ranks(with_and_without, world_size, cases, str(tmp_path), STEPS, timeout_s=280)
    for found in per_rank:
        for case, (plain, late, sleeps) in zip(cases, found, strict=True):
            assert sleeps > 3 * STEPS, f"{case}: {sleeps} sleeps"
            assert late == plain, f"{case}: with delays the bits are others"
