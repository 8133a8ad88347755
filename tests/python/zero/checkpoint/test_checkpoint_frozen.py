"""Saving while training continues: the bytes of a blocking save, no state of the drive in RAM, errors on all ranks."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
from tiers import slow
from zcomm.zero.cache import swap
from zcomm.zero.files import durable

Run = Callable[..., list[Any]]

PLACES: list[tuple[int, Any, str]] = [
    (0, "nvme", "fp32"),
    (1, "cpu", "fp16"),
    (2, ("nvme", None, 0.5), "bf16"),
    (2, None, "bf16"),
    (3, "nvme", "bf16"),
    (3, ("cpu", "nvme", 1.0), "fp32"),
    (3, ("nvme", "cpu", 0.7), "fp32"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 30))
        self.frozen = nn.Parameter(torch.ones(30), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x) * self.frozen


def step(model: nn.Module, opt: Any, number: int) -> None:
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(number)).to(opt.precision.dtype)
    opt.backward(model(x).float().square().mean())
    opt.step()
    opt.zero_grad()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


def save_both_ways(folder: str, copies: str) -> None:
    """Save both ways.

    copies: which code copies the state on the drive. It is the core at once, or gradually the saving thread, or the
    next steps.
    """
    zcomm.init(timeout=60)
    swap.shares_blocks = lambda folder: copies == "core"
    finish = swap.GradualCopy.finish
    zcomm.zero.layout.tiles.TILE_COUNT, zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = (
        192,
        2,
        3,
    )
    here = Path(folder)
    for number, (stage, offload, precision) in enumerate(PLACES):
        torch.manual_seed(5)
        model = Net()
        where = zcomm.Offload(*offload) if isinstance(offload, tuple) else offload
        opt = zcomm.ZeroOptimizer(model, stage=stage, offload=where, nvme_path=here / "drive", precision=precision)
        for each in range(3):
            step(model, opt, each)
        waited, beside = here / f"waited{number}", here / f"beside{number}"
        opt.save(waited)
        drive, made = threading.Event(), threading.Event()
        durable.before_write = lambda what, drive=drive: drive.wait(60)  # type: ignore[misc]

        def gated(self: Any, drive: threading.Event = drive, made: threading.Event = made) -> None:
            if copies == "steps":
                drive.wait(60)
            finish(self)
            made.set()

        swap.GradualCopy.finish = gated  # type: ignore[method-assign]
        task = opt.save(beside, wait=False)
        if copies == "thread" and "nvme" in str(offload):
            assert made.wait(60)
        for each in range(3, 6):
            step(model, opt, each)  # all shards change, in RAM and on the drive
        assert not task.done()
        drive.set()
        task.wait()
        durable.before_write = lambda what: None
        assert files_of(waited) and files_of(waited) == files_of(beside), (stage, offload, precision)
        opt.close()
    zcomm.barrier()
    assert not (here / "drive").exists() or not list((here / "drive").rglob("*"))


@pytest.mark.parametrize(("world_size", "copies"), [(1, "core"), slow(1, "thread"), slow(1, "steps"), (2, "steps")])
def test_the_same_bytes_as_a_save_that_waits(run_ranks: Run, tmp_path: Path, world_size: int, copies: str) -> None:
    run_ranks(save_both_ways, world_size, str(tmp_path), copies)


def one(folder: Path) -> tuple[nn.Module, Any]:
    model = Net()
    return model, zcomm.ZeroOptimizer(model, stage=2, offload="nvme", nvme_path=[folder / "a", folder / "b"])


def test_a_copy_that_fails_ends_the_save_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive is full when a step is about to overwrite state that is not copied yet."""
    monkeypatch.setattr(swap, "shares_blocks", lambda folder: False)
    model, opt = one(tmp_path)
    step(model, opt, 0)
    opt.save(tmp_path / "c")
    before = files_of(tmp_path / "c")
    gate, finish = threading.Event(), swap.GradualCopy.finish

    def late(self: Any) -> None:
        gate.wait(60)
        finish(self)

    def full(self: Any, key: str) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(swap.GradualCopy, "finish", late)
    with monkeypatch.context() as patch:
        patch.setattr(swap.GradualCopy, "_copy", full)
        task = opt.save(tmp_path / "c", wait=False)
        step(model, opt, 1)
        gate.set()
        with pytest.raises(OSError, match="no space"):
            task.wait()
    assert files_of(tmp_path / "c") == before
    opt.save(tmp_path / "c", wait=False).wait()
    assert files_of(tmp_path / "c") != before
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("why", ["space", "directory"])
def test_no_room_for_a_copy_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    monkeypatch.setattr(swap, "shares_blocks", lambda folder: False)
    model, opt = one(tmp_path)
    step(model, opt, 0)

    def full(file: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if why == "space":
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        shutil.rmtree(tmp_path / "b")
    said = {"space": r"no space for a copy of the state, \d+ bytes", "directory": "was removed.*save.wait=True"}[why]
    with pytest.raises(OSError, match=said):
        opt.save(tmp_path / "c", wait=False)
    assert [path.name for path in tmp_path.rglob("*") if path.name == "copy" or "saving" in path.name] == []
    opt.save(tmp_path / "c")
    step(model, opt, 1)
    opt.close()
    zcomm.shutdown()


def test_state_on_a_drive_does_not_come_into_ram(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    opt = zcomm.ZeroOptimizer(model, stage=2, offload="nvme", nvme_path=tmp_path / "drive")
    model(torch.ones(1, 1024)).sum().backward()
    opt.step()
    opt.zero_grad()
    drive = threading.Event()
    durable.before_write = lambda what: drive.wait(60)
    gc.collect()
    try:
        before = psutil.Process().memory_info().rss
        task = opt.save(tmp_path / "c", wait=False)
        grown = psutil.Process().memory_info().rss - before
        (own,) = (tmp_path / "drive").iterdir()
        assert sorted(path.name for path in own.iterdir()) == ["lock"], "neither the data file nor the copy has a name"
    finally:
        drive.set()
        durable.before_write = lambda what: None
    task.wait()
    weights = 4 * 16 * 1024 * 1024
    state = opt.memory()["nvme"]["optimizer"]
    assert state == 2 * weights
    assert grown < weights + state // 4, "the weights are cloned, the state is not"
    opt.close()
    assert list((tmp_path / "drive").iterdir()) == []
    zcomm.shutdown()


def full_drive_on_one(folder: str) -> str:
    comm = zcomm.init(timeout=60)
    model = Net()
    opt = zcomm.ZeroOptimizer(model, stage=2, offload="nvme", nvme_path=f"{folder}/drive")
    opt.save(f"{folder}/c", client_state="first")
    copied = swap.Swap.copied

    def full(self: Any) -> Any:
        if comm.rank == 1:
            raise OSError(errno.ENOSPC, "no space for a copy", "the drive")
        return copied(self)

    swap.Swap.copied = full  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space for a copy") as told:
        opt.save(f"{folder}/c", client_state="second", wait=False)
    assert told.value.errno == errno.ENOSPC
    swap.Swap.copied = copied  # type: ignore[method-assign]
    step(model, opt, 1)
    state = opt.load(f"{folder}/c")
    opt.close()
    return str(state)


def test_a_drive_without_space_for_the_copy_fails_all(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(full_drive_on_one, 2, str(tmp_path)) == ["first", "first"]
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []
