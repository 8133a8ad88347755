"""Updates of weights by rows in forward and backward: one bucket at a time, late reads, interrupts, few rows.

test_mode_faults.py has the faults of the drive at these places.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import update_grid as grid
import zcomm
from update_grid import STATE, Fault, FaultySwap, Run, Training, bits_of
from zcomm.zero import Offload, Units
from zcomm.zero.params.shards import SwapSource


def made(mode: str, folder: Path | str, clip_norm: float | None = None, place: str = "rows", **more: Any) -> Training:
    """Build a training in which every pass uses all units."""
    return Training(mode, folder, place, always=True, clip_norm=clip_norm, **more)


def bits_after(steps: int, mode: str, folder: Path | str, *options: Any) -> str:
    train = made(mode, folder, *options)
    train.run(steps)
    found = train.bits()
    train.opt.close()
    return found


# --- one bucket at a time -------------------------------------------------------------------------------------------


def look(folder: str) -> None:
    """Log the reads and updates of the weights' buckets in a forward after a step."""
    zcomm.init(timeout=60)
    train = made("nvme, forward", folder, 1.0, prefetch=0)
    train.run(1)
    parts, log = train.opt._open_parts, []
    by_rows = [unit for unit in parts.store.units if unit.by_rows]
    assert len(by_rows) == len(train.net.blocks) and all(len(unit.buckets) == 2 for unit in by_rows)

    def logging(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def logged(self: Any, bucket: Any, *rest: Any) -> Any:
            log.append((name, bucket.index))
            return act(self, bucket, *rest)

        return logged

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "fetch_part"):
            patch.setattr(SwapSource, name, logging(name, getattr(SwapSource, name)))
        before = parts.swap.stats()["read_nbytes"]
        train.forward()
        read = parts.swap.stats()["read_nbytes"] - before
    expected = [bucket.index for unit in by_rows for bucket in unit.buckets]
    assert log == [("load", index) for index in expected], "each once: rows are taken out of what was updated"
    assert not parts.updates.waits
    shards = sum(bucket.shard_count for bucket in parts.geometry.buckets)
    assert read <= shards * (4 + 8 + 4) * 1.1 + 2**16, "weights, two moments and sums, each once"
    train.backward()
    train.step()
    train.opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_updates_bucket_by_bucket_before_its_rows(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(look, world_size, str(tmp_path))


# --- rows that are read late ----------------------------------------------------------------------------------------


def read_late(folder: str, mode: str, since: int) -> tuple[str, int]:
    """Read rows of a weight in backward after its gradient, from step ``since`` on. Returns: bits, and updates in
    backward."""
    train, updated = made(mode, folder), 0

    def late(grad: torch.Tensor) -> None:
        F.linear(grad.detach(), train.net.blocks[2].weight)

    for number in range(5):
        train.net.late = late if number >= since else None
        train.half()
        updated += train.opt._open_parts.updates.pending
        train.step()
        train.opt.zero_grad()
    found = train.bits()
    train.opt.close()
    return found, updated


def reads_late(folder: str) -> None:
    zcomm.init(timeout=20)
    wanted, none = read_late(folder, "nvme, step", 9)
    assert read_late(folder, "nvme, forward", 0) == (wanted, 0) and not none
    with pytest.raises(RuntimeError, match=r"backward uses unit blocks\.2\.weight again.*nothing has been changed"):
        read_late(folder, "nvme, backward", 0)
    with pytest.raises(RuntimeError, match=r"backward uses unit blocks\.2\.weight again, of which it has all grad"):
        read_late(folder, "nvme, backward", 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_are_read_after_their_gradient(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(reads_late, world_size, str(tmp_path))


def between(folder: str) -> None:
    """Use weights by rows between backward and step()."""
    zcomm.init(timeout=20)
    train = made("nvme, backward", folder)
    train.run(2)
    train.half()
    net = train.net
    for use in (lambda: net.blocks[0](torch.ones(grid.WIDTH)), lambda: net.blocks[1].weight.sum(), train.forward):
        with pytest.raises(RuntimeError, match="backward has updated the weights already"):
            use()
    train.step()
    train.opt.zero_grad()
    train.run(5)
    found = train.bits()
    train.opt.close()
    assert bits_after(5, "nvme, step", folder) == found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_use_before_step_raises(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(between, world_size, str(tmp_path))


# --- interrupts -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Error that a signal's handler raises."""


def stop(*_: Any) -> None:
    raise Stop


@pytest.mark.parametrize("mode", ["nvme, forward", "atomic, forward"])
def test_a_forward_that_an_interrupt_ends_can_be_run_again(tmp_path: Path, mode: str) -> None:
    """Interrupt a forward while the drive is slow to read the state of rows that it updates; run it again."""
    wanted = bits_after(4, "nvme, step", tmp_path, 1.0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with grid.small_spans("rows"):
            train = made(mode, tmp_path, 1.0)
            train.run(2)
            for good in (2, 30):
                FaultySwap.arm(Fault("read", STATE, good=good, stall_s=1.5))
                signal.setitimer(signal.ITIMER_REAL, 0.75)
                with pytest.raises(Stop):
                    train.forward()
                    signal.pause()
            train.run(4)
            assert train.bits() == wanted
            train.opt.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    zcomm.shutdown()


@pytest.mark.parametrize("mode", ["nvme, backward", "atomic, backward"])
def test_a_backward_that_is_interrupted_as_it_reads_rows_poisons_or_is_undone(tmp_path: Path, mode: str) -> None:
    wanted = bits_after(5, "nvme, step", tmp_path)
    train, begun = made(mode, tmp_path), []
    train.run(3)

    def fail(grad: torch.Tensor) -> None:
        begun.append(train.opt._open_parts.updates.pending)
        raise Stop

    train.net.late = fail
    with pytest.raises(Stop):
        train.half()
    assert begun == [True]
    train.net.late = None
    if train.case.atomic:
        train.opt.zero_grad()
        train.run(5)
        assert train.bits() == wanted
    else:
        with pytest.raises(RuntimeError, match="half way"):
            train.forward()
    train.opt.close()
    zcomm.shutdown()


# --- an embedding, few rows of which a forward reads ------------------------------------------------------------------


def update_behind(folder: str) -> None:
    """Count the deferred updates after each block of a forward: one less, unless the tokens' bucket was next."""
    zcomm.init(timeout=60)
    train = made("nvme, forward", folder, 1.0, "few rows", prefetch=0)
    train.run(1)
    parts = train.opt._open_parts
    embed = next(unit for unit in parts.store.units if unit.by_rows)
    mine, left = {bucket.index for bucket in embed.buckets}, []
    assert len(mine) == 4

    def look(*_: Any) -> None:
        parts.store.gather.synchronize()
        left.append(len(mine & parts.updates._left.keys()))

    handles = [module.register_forward_hook(look) for module in (train.net.embed, *train.net.blocks)]
    train.forward()
    assert left == [3, 2, 2, 1, 0]
    for handle in handles:
        handle.remove()
    train.backward()
    train.step()
    train.opt.zero_grad()
    train.run(4)
    found = train.bits()
    train.opt.close()
    assert bits_after(4, "nvme, step", folder, 1.0, "few rows") == found


@pytest.mark.parametrize("world_size", [1, 2])
def test_buckets_without_tokens_are_updated_behind_the_forward(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(update_behind, world_size, str(tmp_path))


def settle_alone(folder: str) -> str:
    """Settle on only one rank: the updates behind a forward continue in the same way."""
    comm = zcomm.init(timeout=20)
    train = made("nvme, forward", folder, 1.0, "few rows")
    for number in range(3):
        train.run(number + 1)
        if comm.rank == number % 2:
            train.opt.join()
        with torch.no_grad():
            train.forward()
            train.forward()
    found = train.bits()
    train.opt.close()
    return found


def test_a_rank_that_settles_alone(run_ranks: Run, tmp_path: Path) -> None:
    assert len(set(run_ranks(settle_alone, 2, str(tmp_path)))) == 1


class Branches(nn.Module):
    """An embedding, many rows of which no token reads, wide Linears, and a block without a gradient on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(16, 2200, bias=False) for _ in range(4))

    def forward(self, tokens: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            for _ in range(times if number == 1 else 1):
                y = torch.tanh(block(x))
                x = x + (y.detach() if number == 1 and zcomm.rank() % 2 else y)
        for wide in self.wide:
            x = x + wide(x)[..., :16]
        return x.square().mean()


def train_branches(folder: str, update: Any, repeats: bool) -> str:
    """Train with ranks that use units a different number of times; repeats: in forward, too."""
    comm = zcomm.init(timeout=20)
    torch.manual_seed(1)
    units = Units(max_bytes=1600 * 16 * 4, rows=True)
    offload = Offload("nvme", "nvme", gradients="nvme", update=update)
    options = {"stage": 3, "offload": offload, "nvme_path": folder, "units": units, "bucket_mb": 0.02, "prefetch": 3}
    opt = zcomm.ZeroOptimizer(net := Branches(), lr=1e-2, **options)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + comm.rank)
        tokens = torch.randint(0, 900, (2, 5), generator=generator)
        net(tokens, 1 + 2 * comm.rank if repeats else 1).backward()
        opt.step()
        opt.zero_grad()
    found = bits_of(opt)
    opt.close()
    return found


@pytest.mark.parametrize("repeats", [False, True])
def test_ranks_may_use_a_unit_a_different_number_of_times(run_ranks: Run, tmp_path: Path, repeats: bool) -> None:
    wanted = run_ranks(train_branches, 2, str(tmp_path), "step", repeats)
    for update in ("forward", "backward"):
        assert run_ranks(train_branches, 2, str(tmp_path), update, repeats) == wanted, update
