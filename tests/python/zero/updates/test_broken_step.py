"""A step that ends half way: no step, save or state_dict afterwards, on any rank, until a checkpoint is loaded. Then
the bits of a run in which nothing went wrong."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
import zcomm.zero.optim_state.ram
from tiers import slow
from zcomm.zero.cache.swap import Swap

WIDTH = 64
Run = Callable[..., list[Any]]


class FailedWork:
    """A read or write that has ended with an error and left its target unchanged."""

    def wait(self, timeout: float | None = None) -> None:
        raise OSError(errno.EIO, "read of key: once", "/drive/data")

    def done(self) -> bool:
        return True


class FaultySwap(Swap):
    """The read after ``good_reads`` others, and the write of weights after ``good_writes`` others, fail once."""

    good_reads: int | None = None
    good_writes: int | None = None

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        if FaultySwap.good_writes is not None and key.startswith("parameters."):
            FaultySwap.good_writes -= 1
            if FaultySwap.good_writes < 0:
                FaultySwap.good_writes = None
                return FailedWork()
        return super().write(key, ptr, nbytes)

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        if FaultySwap.good_reads is not None:
            FaultySwap.good_reads -= 1
            if FaultySwap.good_reads < 0:
                FaultySwap.good_reads = None
                return FailedWork()
        return super().read(key, ptr, nbytes)


class Faults:
    """Faults of a rank, by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
        patch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
        patch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
        patch.setattr(zcomm.zero.assemble, "Swap", FaultySwap)
        self._step_tile = zcomm.zero.optim_state.ram.ShardState._step_tile
        patch.setattr(zcomm.zero.optim_state.ram.ShardState, "_step_tile", lambda *args: self._tile(*args))
        self._tiles: tuple[int, BaseException] | None = None

    def arm(self, what: str) -> type[BaseException]:
        if what == "read":
            FaultySwap.good_reads = 3
            return OSError
        if what == "write":
            FaultySwap.good_writes = 1
            return OSError
        self._tiles = 2, KeyboardInterrupt() if what == "interrupt" else MemoryError("no room")
        return type(self._tiles[1])

    def _tile(self, *args: Any) -> None:
        if self._tiles is not None:
            left, error = self._tiles
            self._tiles = (left - 1, error) if left else None
            if not left:
                raise error
        self._step_tile(*args)


def build(stage: int, tier: Any, folder: Path, precision: str = "bf16") -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(3)))
    how = {"bucket_mb": 0.01, "clip_norm": 1.0, "precision": precision}
    return model, zcomm.ZeroOptimizer(model, lr=0.01, stage=stage, offload=tier, nvme_path=folder, **how)


def step(model: nn.Module, opt: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(7 * number + zcomm.rank())
    model(torch.randn(4, WIDTH, generator=generator).bfloat16()).float().square().mean().backward()
    opt.step()
    opt.zero_grad()


def weights(opt: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = opt.full_state_dict()
    return found


def refused(what: str, call: Callable[[], Any], cause: BaseException) -> None:
    with pytest.raises(RuntimeError, match=rf"^{what}\(.*\): .* load a checkpoint") as told:
        call()
    assert told.value.__cause__ is cause


def broken_and_mended(stage: int, tier: Any, what: str, folder: str, failing: int) -> None:
    """On each rank; ``failing`` is where it happens."""
    comm = zcomm.init()
    base, here = Path(folder), comm.rank == failing
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        model, opt = build(stage, tier, base / "drive")
        for number in range(3):
            step(model, opt, number)
            if number == 1:
                opt.save(base / "good")
        expected: type[BaseException] = OSError if what in ("read", "write") else RuntimeError
        if here:
            expected = faults.arm(what)
        with pytest.raises(expected) as told:
            step(model, opt, 3)
        assert here or f"rank {failing}" in str(told.value)
        assert expected is not OSError or told.value.errno == errno.EIO  # type: ignore[attr-defined]
        manifest = (base / "good" / "manifest.json").read_bytes()
        refused("step", opt.step, told.value)
        refused("save", lambda: opt.save(base / "good"), told.value)
        refused("save", lambda: opt.save(base / "good", wait=False), told.value)
        refused("state_dict", opt.state_dict, told.value)
        refused("load_state_dict", lambda: opt.load_state_dict({}), told.value)
        refused("load", lambda: opt.load(base / "good", optimizer=False), told.value)
        with pytest.raises(OSError):
            opt.load(base / "nothing")  # mends nothing
        refused("step", opt.step, told.value)
        assert (base / "good" / "manifest.json").read_bytes() == manifest

        opt.load(base / "good")
        twin_model, twin = build(stage, tier, base / "twin")
        for number in range(2):
            step(twin_model, twin, number)
        for number in range(2, 6):
            step(model, opt, number)
            step(twin_model, twin, number)
        ours, theirs = weights(opt), weights(twin)
        assert opt.step_count == twin.step_count == 6
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        one, other = opt.state_dict(), twin.state_dict()
        for index, entry in other["state"].items():
            assert all(torch.equal(one["state"][index][key], value) for key, value in entry.items()), index
        opt.close()
        twin.close()
    zcomm.shutdown()


SUMS = zcomm.Offload("nvme", "nvme", gradients="nvme", update="step")
WAITS = zcomm.Offload("nvme", "nvme", gradients="nvme", update="forward")
CASES = [
    (2, "nvme", "read"),
    (3, "nvme", "read"),
    (3, "nvme", "interrupt"),
    (2, "nvme", "interrupt"),
    (2, None, "interrupt"),
    (0, None, "memory"),
    (3, SUMS, "read"),
    (3, WAITS, "read"),
    (3, WAITS, "interrupt"),
    (3, WAITS, "write"),
]


@pytest.mark.parametrize(("stage", "tier", "what"), CASES)
def test_alone(tmp_path: Path, stage: int, tier: Any, what: str) -> None:
    broken_and_mended(stage, tier, what, str(tmp_path), 0)


@pytest.mark.parametrize(("stage", "tier", "what"), [CASES[2], *(slow(*case) for case in (*CASES[:2], *CASES[5:]))])
def test_one_of_two_ranks(run_ranks: Run, tmp_path: Path, stage: int, tier: Any, what: str) -> None:
    """The other one raises at once, instead of waiting."""
    run_ranks(broken_and_mended, 2, stage, tier, what, str(tmp_path), 1)
