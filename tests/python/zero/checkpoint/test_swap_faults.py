"""Training with its state on a faulty drive: typed errors that name key, path and offset, or the same bits.

Runs on both engines of the swap file.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from programs import Program
from swap_files import nameless
from zcomm import _core

WIDTH = 64


@pytest.fixture(params=["io_uring", "threads"], autouse=True)
def engine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "io_uring":
        try:
            _core.SwapFile([str(tmp_path)], engine="io_uring").close()
        except NotImplementedError:
            pytest.skip("io_uring is refused here")
    monkeypatch.setenv("ZCOMM_IO", request.param)
    return str(request.param)


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make spans small, so that the ring wraps: 11 spans through 4 windows."""
    import zcomm.zero.layout.tiles
    import zcomm.zero.optim_state.nvme

    monkeypatch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)


def build(folder: Path | None) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    offload = None if folder is None else zcomm.Offload("nvme")
    return model, zcomm.ZeroOptimizer(model, lr=0.01, stage=2, offload=offload, nvme_path=folder)


def step(model: nn.Module, opt: Any) -> None:
    generator = torch.Generator().manual_seed(opt.step_count)
    model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def data_file(opt: Any, engine: str) -> Path:
    stats = opt._live.swap.stats()
    assert stats["engine"] == engine
    opt._live.swap.wait()
    return Path(str(stats["path"]))


@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_damage_ends_the_step_and_is_named(tmp_path: Path, engine: str, how: str) -> None:
    model, opt = build(tmp_path / "drive")
    for _ in range(3):  # the next sweep goes forward: span 0 is loaded last
        step(model, opt)
    path = data_file(opt, engine)
    if how == "truncated":
        os.truncate(nameless(path), 5 * 4096)
    else:
        with nameless(path).open("r+b", buffering=0) as file:
            for span in range(11):
                file.seek(span * 4096 + 17)
                byte = file.read(1)
                file.seek(span * 4096 + 17)
                file.write(bytes([byte[0] ^ 4]))
            os.fsync(file.fileno())
    before = model.weight.detach().clone().view(-1)
    with pytest.raises(OSError, match=r"read of key 'state\.0\.[0-9]+' at offset [0-9]+ of ") as told:
        step(model, opt)
    assert told.value.errno == errno.EIO and told.value.filename == str(path)
    key = re.search(r"'state\.0\.([0-9]+)' at offset ([0-9]+)", str(told.value))
    assert key is not None and int(key[2]) // 4096 == int(key[1]) // 384, "the extent of that key"
    assert "written" in str(told.value) or how == "truncated"
    first_bad = int(key[1])  # the sweep began with the first span: whole spans are new, the others are unchanged
    changed = (model.weight.detach().view(-1) != before).view(-1, 64).any(dim=1)
    assert changed[: first_bad // 64].all() and not changed[first_bad // 64 :].any()
    after = model.weight.detach().clone()
    with pytest.raises(RuntimeError, match=r"step\(\): OSError ended a step .*half way") as again:
        step(model, opt)  # raises again: no data are invented
    assert again.value.__cause__ is told.value and torch.equal(model.weight, after)
    opt.close()
    assert list((tmp_path / "drive").iterdir()) == []
    zcomm.shutdown()


def test_a_directory_removed_underneath_changes_no_bit(tmp_path: Path, engine: str) -> None:
    model, opt = build(tmp_path / "drive")
    twin, in_ram = build(None)
    for number in range(4):
        if number == 2:
            data_file(opt, engine)
            shutil.rmtree(tmp_path / "drive")
        step(model, opt)
        step(twin, in_ram)
    assert torch.equal(model.weight, twin.weight)
    opt.close()
    in_ram.close()
    zcomm.shutdown()


def test_two_runs_on_one_directory_and_the_dead_ones_is_reclaimed(
    start_program: Callable[..., Program], tmp_path: Path, engine: str
) -> None:
    drive = tmp_path / "drive"
    model, opt = build(drive)
    twin, in_ram = build(None)
    other = textwrap.dedent(
        f"""
        import os, signal, torch, zcomm
        model = torch.nn.Linear(700, 700)
        opt = zcomm.ZeroOptimizer(model, offload="nvme", nvme_path={str(drive)!r})
        for _ in range(2):
            model(torch.ones(1, 700)).sum().backward()
            opt.step()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    env = {**os.environ, "ZCOMM_IO": engine}
    for _ in range(2):
        step(model, opt)
        step(twin, in_ram)
        killed = start_program(other, env=env)
        assert killed.wait() == -signal.SIGKILL, killed.stderr
        assert len(list(drive.iterdir())) == 2, "ours, and that of the last one killed: it removed the one before"
    step(model, opt)
    step(twin, in_ram)
    assert torch.equal(model.weight, twin.weight)
    _, third = build(drive)
    assert len(list(drive.iterdir())) == 2, "both live"
    for each in (opt, third, in_ram):
        each.close()
    assert list(drive.iterdir()) == []
    zcomm.shutdown()


def test_a_write_back_that_fails_ends_training(tmp_path: Path, engine: str) -> None:
    """The kernel writes part of a span, then refuses: no step continues with half-old state."""
    import resource

    model, opt = build(tmp_path / "drive")
    twin, in_ram = build(None)
    for _ in range(2):
        step(model, opt)
        step(twin, in_ram)
    opt.save(tmp_path / "good")
    path = data_file(opt, engine)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5 * 4096 + 512, before[1]))
    try:
        with pytest.raises(OSError, match=r"write of key 'state\.0\.[0-9]+' at offset [0-9]+ of ") as told:
            for _ in range(3):  # the next step waits for write-back of the last spans
                step(model, opt)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.errno == errno.EFBIG and told.value.filename == str(path)
    with pytest.raises(RuntimeError, match="half way"):  # the drive works again, but the state is broken
        step(model, opt)
    opt.load(tmp_path / "good")  # spans without data on the drive are written again
    for _ in range(3):
        step(model, opt)
        step(twin, in_ram)
    assert torch.equal(model.weight, twin.weight)
    opt.save(tmp_path / "good")  # the errors of the failed writes are not raised again
    opt.close()
    in_ram.close()
    assert list((tmp_path / "drive").iterdir()) == []
    zcomm.shutdown()


def test_a_drive_that_fills_up_is_said_before_training(tmp_path: Path, engine: str) -> None:
    import resource

    zcomm.init()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="RLIMIT_FSIZE") as told:
            build(tmp_path / "drive")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.errno == errno.ENOSPC
    assert list((tmp_path / "drive").iterdir()) == []
    zcomm.shutdown()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_construction_that_fails_gives_the_drive_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """Also while the error is referenced, as an interactive interpreter keeps the last one."""
    zcomm.init()

    def fails(*args: Any, **options: Any) -> None:
        raise kind("while the first weights are written")

    monkeypatch.setattr(zcomm.zero.assemble, "start", fails)
    with pytest.raises(kind, match="first weights") as told:
        build(tmp_path / "drive")
    assert list((tmp_path / "drive").iterdir()) == [], told
    monkeypatch.undo()
    _, opt = build(tmp_path / "drive")
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("begins", [False, True])
def test_a_model_that_lost_weights_in_a_failed_construction_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """Otherwise a second try would find empty parameters, or read freed ones."""
    zcomm.init()
    write, left = zcomm.zero.cache.swap.Swap.write, [0]
    writes: list[int] = []  # per construction

    def fails(swap: Any, *args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "no space left")
        return write(swap, *args)

    def once(number: int) -> str:
        torch.manual_seed(3)
        with zcomm.zero.Init(enabled=begins):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        left[0] = number
        options: dict[str, Any] = {"stage": 3, "offload": "nvme", "nvme_path": tmp_path / "drive"}
        if number:
            with pytest.raises(OSError, match="no space left"):
                zcomm.ZeroOptimizer(model, **options)
        try:
            opt = zcomm.ZeroOptimizer(model, **options)
            writes.append(-left[0])
        except ValueError as error:
            assert "0.weight" in str(error) and "OSError" in str(error) and "build the model again" in str(error)
            return "refused"
        bits = "".join(value.sum().item().hex() for value in opt.full_state_dict().values())
        opt.close()
        return bits

    monkeypatch.setattr(zcomm.zero.cache.swap.Swap, "write", fails)
    wanted = once(0)
    assert once(1) == wanted, "nothing was lost yet"
    assert once(writes[0]) == "refused", "the last write is of weights"
    zcomm.shutdown()
