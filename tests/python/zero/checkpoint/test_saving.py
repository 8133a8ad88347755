"""Saving: killed at any write, on a full disk, during training, awaited; a folder is never half-written."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
import zcomm.schedulers
from test_checkpoint import build, everything, tiny, train
from zcomm.zero.checkpoint import SaveTask, read_manifest
from zcomm.zero.files import durable

Run = Callable[..., list[Any]]


class Killed(BaseException):
    """Stands for SIGKILL: no code of the program runs afterwards."""


def test_a_kill_at_any_write_leaves_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tiny(tmp_path, 1), tiny(tmp_path, 2)
    want = {"old": old[0].weight.clone(), "new": new[0].weight.clone()}
    probe, reader = tiny(tmp_path, 3)
    rmtree = shutil.rmtree
    points: list[str] = []
    number = 0
    seen = set()
    while number == 0 or number <= len(points):
        rmtree(tmp_path / "c", ignore_errors=True)
        old[1].save(tmp_path / "c")
        points.clear()

        def at_write(what: str, stop: int = number) -> None:
            points.append(what)
            if stop == len(points):
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(durable, "before_write", at_write)
            if number:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a dead process removes nothing
                with pytest.raises(Killed):
                    new[1].save(tmp_path / "c")
            else:
                new[1].save(tmp_path / "c")
        all_points = list(points) if number == 0 else all_points  # noqa: F821
        reader.load(tmp_path / "c")
        (which,) = [name for name, weight in want.items() if torch.equal(weight, probe.weight)]
        seen.add(which)
        assert which == "new" or number, "the save that was not killed counts"
        new[1].save(tmp_path / "c")  # and the next save works, and removes the remains of the dead one
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        number += 1
        points[:] = all_points
    assert seen == {"old", "new"} and len(all_points) >= 12
    for optimizer in (old[1], new[1], reader):
        optimizer.close()
    zcomm.shutdown()


def killed_for_good(folder: str) -> None:
    _, opt = tiny(Path(folder), 1)
    opt.save(f"{folder}/c", client_state="first")
    count = 0

    def at_write(what: str) -> None:
        nonlocal count
        count += 1
        if count == 4 and zcomm.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    durable.before_write = at_write
    opt.save(f"{folder}/c", client_state="second")


def test_a_rank_killed_while_saving(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(killed_for_good, 2, str(tmp_path), check=False)
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None and first.error.kind == "PeerLost"
    assert read_manifest(tmp_path / "c").client_state == "first"


def disk_full_on_one(folder: str) -> str:
    import resource

    model = nn.Sequential(nn.Linear(300, 30, bias=False), nn.Linear(30, 300, bias=False))
    opt = zcomm.ZeroOptimizer(model, stage=1)
    opt.save(f"{folder}/c", client_state="first")
    if zcomm.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        opt.save(f"{folder}/c", client_state="second")
    except OSError as error:
        assert error.errno == errno.EFBIG
        return str(error)
    return "no error"


def test_a_rank_that_cannot_write_fails_all(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(disk_full_on_one, 2, str(tmp_path))
    assert "File too large" in first + second
    assert "failed on rank 1" in first and "model-00002-of-00002.safetensors" in second
    assert read_manifest(tmp_path / "c").client_state == "first"
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []


def save_while_training(folder: str) -> tuple[Any, Any, Any]:
    comm = zcomm.init(timeout=2)
    model, opt, schedule = build("adamw", 2, "nvme", "bf16", folder)
    train(model, opt, schedule, range(2))
    at_save = everything(model, opt)

    def slow(what: str) -> None:
        if comm.rank == 1 and what.startswith("sync model"):
            time.sleep(3)  # longer than the deadline

    durable.before_write = slow
    task = opt.save(f"{folder}/ckpt", scheduler=schedule, wait=False)
    train(model, opt, schedule, range(2, 4))
    assert not task.done() and not os.path.exists(f"{folder}/ckpt")
    task.wait()
    later = everything(model, opt)
    opt.save(f"{folder}/ckpt2", wait=False)
    durable.before_write = lambda what: None
    opt.load(f"{folder}/ckpt", scheduler=schedule)
    loaded = everything(model, opt)
    opt.save(f"{folder}/ckpt3", wait=False)
    opt.close()  # waits
    assert read_manifest(Path(folder) / "ckpt2") and read_manifest(Path(folder) / "ckpt3")
    return at_save, later, loaded


def test_training_goes_on_while_a_slow_drive_saves(run_ranks: Run, tmp_path: Path) -> None:
    for at_save, later, loaded in run_ranks(save_while_training, 2, str(tmp_path)):
        assert later != at_save
        for values in (loaded, at_save):
            del values["buffers"]  # rank 0's buffers are saved
        assert loaded == at_save


def engine_saves_while_training(folder: str) -> list[bool]:
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    one, _, _, _ = zcomm.initialize(model=nn.Linear(5, 3), config={**config, "zero_optimization": {"stage": 2}})
    drive = threading.Event()

    def slow(what: str) -> None:
        if not what.startswith("sync folder"):
            assert drive.wait(60)

    def step() -> None:
        one.backward(one(torch.ones(2, 5)).square().mean())
        one.step()

    step()
    seen = [one.module.weight.detach().clone()]
    durable.before_write = slow
    tasks = []
    for save in (
        lambda: one.save_checkpoint(folder, wait=False),
        lambda: one.save_16bit_model(f"{folder}/export", wait=False),
    ):
        drive.clear()
        task = save()
        assert isinstance(task, SaveTask)
        step()
        step()
        seen.append(one.module.weight.detach().clone())
        tasks.append(task.done())  # the drive was blocked while training advanced
        drive.set()
        task.wait()
    assert not torch.equal(seen[0], seen[1])
    assert (Path(folder) / "latest").read_text() == "global_step1"
    exported = load_file(f"{folder}/export/model.safetensors")
    assert torch.equal(exported["weight"], seen[1]), "as it was when save_16bit_model was called"
    one.load_checkpoint(folder)
    assert torch.equal(one.module.weight, seen[0]) and one.global_steps == 1

    def full(what: str) -> None:
        if zcomm.rank() == 0:
            raise OSError(errno.ENOSPC, "the drive is full")

    durable.before_write = full
    failing = one.save_16bit_model(f"{folder}/export2", wait=False)
    step()
    assert isinstance(failing, SaveTask)
    with pytest.raises(OSError, match="the drive is full") as told:
        failing.wait()
    assert told.value.errno == errno.ENOSPC and not os.path.exists(f"{folder}/export2/model.safetensors")
    durable.before_write = lambda what: None
    one.destroy()
    return tasks


def test_an_engine_trains_while_it_saves_and_exports(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(engine_saves_while_training, 2, str(tmp_path)) == [[False, False], [False, False]]


def test_a_save_can_be_awaited(tmp_path: Path) -> None:
    """The event loop runs on while the drive is busy."""
    _, opt = tiny(tmp_path, 1)
    drive = threading.Event()

    async def main() -> list[str]:
        durable.before_write = lambda what: drive.wait(60)
        task = opt.save(tmp_path / "c", wait=False)
        seen = []

        async def other() -> None:
            seen.append("other")
            drive.set()

        beside = asyncio.create_task(other())
        await task
        seen.append("saved")
        await beside
        return seen

    try:
        assert asyncio.run(main()) == ["other", "saved"]
    finally:
        durable.before_write = lambda what: None
    assert read_manifest(tmp_path / "c")
    opt.close()
    zcomm.shutdown()
