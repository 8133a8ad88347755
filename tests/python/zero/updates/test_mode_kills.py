"""kill -9, Ctrl-C and a full drive in each mode of sums and updates: others learn of it, and the checkpoint loads.

A rank is killed at an operation of its drive, or in a call of the step. Then a new job loads the last checkpoint and
trains to the bits of a run that nothing disturbed.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest

import update_grid as grid
import zcomm
from interrupts import interrupted_at, lines_of
from simulated import on_device
from swap_files import nameless
from tiers import long, one_in, slow
from update_grid import STATE, SUMS, WEIGHTS, Fault, Run, Training
from zcomm.zero import StepUndoneError
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.forward import InForward

Method = tuple[type, str]


def kill(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(death: Fault | Method) -> None:
    """Let this process die. It never goes on, so that nothing is put back."""
    if isinstance(death, Fault):
        grid.FaultySwap.arm(death)
    else:
        setattr(*death, kill)


def save(train: Training, base: Path) -> None:
    train.opt.save(base / "good")


def load(train: Training, base: Path) -> None:
    train.opt.load(base / "good")


def go_on(train: Training, base: Path) -> None:
    train.run(5)


def at(what: str, key: str, good: int = 0) -> Fault:
    return Fault(what, key, good=good, kills=True)


# mode, action, the death
KILLS: list[tuple[str, Callable[[Training, Path], None], Fault | Method]] = [
    ("nvme, step", go_on, at("write", SUMS, 1)),
    ("nvme, step", go_on, at("write", STATE, 2)),
    ("nvme, forward", go_on, at("write", STATE, 1)),
    ("nvme, forward", go_on, at("write", WEIGHTS)),
    ("nvme, forward", go_on, at("read", SUMS, 1)),
    ("nvme, forward", go_on, (InForward, "_defer")),
    ("nvme, forward", save, at("write", STATE, 2)),
    ("nvme, forward", load, at("write", WEIGHTS, 9)),
    ("nvme, backward", go_on, at("write", STATE, 1)),
    ("nvme, backward", go_on, at("write", WEIGHTS, 1)),
    ("nvme, backward", go_on, (InBackward, "_finish")),
    ("nvme, backward", go_on, (InBackward, "_ended")),
    ("nvme, backward", go_on, (SumRing, "begin_pass")),
    ("nvme, backward", save, at("read", WEIGHTS, 1)),
    ("nvme, backward", load, at("write", WEIGHTS, 3)),
]


def die(number: int, folder: str, victim: int) -> tuple[str, float]:
    """Train until a rank dies. Returns: its error on another rank, and when it came."""
    comm, base = zcomm.init(timeout=60), Path(folder)
    mode, act, death = KILLS[number]
    with grid.small_spans():
        train = Training(mode, base / "drive", clip_norm=None)
        train.run(2)
        train.opt.save(base / "good")
        train.run(3)
        if comm.rank == victim:
            (base / "armed").write_text(str(time.monotonic()))
            arm(death)
        with pytest.raises(zcomm.PeerLost) as told:
            act(train, base)
            pytest.fail("no rank has died")
        assert told.value.rank == victim
        return str(told.value), time.monotonic()


def load_all(folders: list[str], modes: list[str]) -> tuple[str, list[str]]:
    """Load the checkpoints, and train on. Returns: the bits of an undisturbed run, and those that were found."""
    zcomm.init(timeout=60)
    found = []
    with grid.small_spans():
        wanted = grid.reference("nvme, step", "host", Path(folders[0]), [5], clip_norm=None)
        for folder, mode in zip(folders, modes, strict=True):
            train = Training(mode, Path(folder) / "drive", clip_norm=None)
            train.opt.load(Path(folder) / "good")
            train.run(5)
            found.append(train.bits())
            train.opt.close()
    return wanted[5][0], found


@pytest.mark.leaves_swap
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("place", "world_size", "third"),
    [("host", 2, 1), slow("host", 2, 0), slow("host", 2, 2)]
    + [long(place, world_size, third) for place, world_size in (("host", 1), ("device", 2)) for third in range(3)],
)
def test_kill_9_in_each_mode(
    start_ranks_in: Any, run_ranks: Run, tmp_path: Path, place: str, world_size: int, third: int
) -> None:
    folders, kills = [], range(third, len(KILLS), 3)
    for number in kills:
        (folder := tmp_path / str(number)).mkdir()
        folders.append(str(folder))
        job = (number, str(folder), world_size - 1)
        (world,) = grid.run_at(place, world_size, lambda *of: [start_ranks_in(*of)], die, *job)
        results = world.join(60)
        assert results[-1].exitcode == -9, f"{KILLS[number]}: {results[-1].describe()}"
        for result in results[:-1]:
            assert result.error is None, f"{KILLS[number]}: {result.describe()}"
            words, when = result.value
            assert "rank 1" in words and when - float((folder / "armed").read_text()) < 20, words
    for wanted, found in run_ranks(load_all, world_size, folders, [KILLS[number][0] for number in kills]):
        assert found == [wanted] * len(found), [each == wanted for each in found]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

FILES = ("python/zcomm/zero/",)


def interrupt(place: str, mode: str, folder: str, moments: int) -> dict[str, int]:
    """Interrupt a step at lines of its code. Returns: how often it was not made, made, or ended half way."""
    zcomm.init(timeout=20)
    base, counts = Path(folder), {"before": 0, "after": 0, "poisoned": 0}
    atomic = grid.MODES[mode][0].atomic
    at = grid.FAULTY if atomic else 3
    more: dict[str, Any] = {"clip_norm": None} if atomic else {}

    def one() -> None:
        train.half()
        train.step()
        if atomic:
            train.opt.join()

    with grid.small_spans():
        wanted = grid.reference(mode, place, base, [at, at + 1, at + 2], **more)
        bits = {wanted[at][0]: "before", wanted[at + 1][0]: "after"}
        train = Training(mode, base / "drive", **more)
        train.run(at)
        train.opt.save(base / "good")
        lines = lines_of(one, FILES)
        train.opt.zero_grad()
        assert train.bits() == wanted[at + 1][0]
        for number in range(moments):
            if not atomic or train.opt.step_count != at:
                train.opt.load(base / "good")
            interrupted_at(1 + number * (lines + 9) // moments, one, FILES)
            try:
                if train.opt._parts.updates.pending and not atomic:
                    train.opt.step()
                train.opt.zero_grad()
                try:
                    found = bits[train.bits()]
                except StepUndoneError:
                    found = bits[train.bits()]
                assert not atomic or train.opt.step_count == at + (found == "after")
                counts[found] += 1
            except RuntimeError as error:
                assert "load a checkpoint" in str(error) and not atomic, str(error)
                counts["poisoned"] += 1
        train.opt.load(base / "good")
        train.run(at + 2)
        assert train.bits() == wanted[at + 2][0]
        train.opt.close()
    zcomm.shutdown()
    return counts


def interrupts(place: str, modes: str, moments: int) -> list[tuple[str, str, int]]:
    return [(place, f"{modes}, {update}", moments) for update in ("step", "forward", "backward")]


@pytest.mark.timeout_s(280)
@pytest.mark.parametrize(
    ("place", "mode", "moments"),
    [
        *one_in(3, 1, interrupts("host", "nvme", 60)),
        *starmap(long, interrupts("host", "nvme", 240)),
        *one_in(3, 2, interrupts("device", "nvme", 30)),
        *one_in(3, 2, interrupts("host", "atomic", 40)),
    ],
)
def test_an_interrupt_leaves_no_half_step(tmp_path: Path, place: str, mode: str, moments: int) -> None:
    job = (interrupt, place, mode, str(tmp_path), moments)
    counts = on_device(grid.SEED, *job) if place == "device" else interrupt(*job[1:])
    assert counts["before"], counts
    if moments >= 60:  # with "atomic" threads decide which moments are inside of the step
        assert counts["poisoned"] or mode == "nvme, forward", counts
    if moments >= 240:  # fewer may miss the few lines after the commit
        assert counts["after"], counts


def leave(mode: str, folder: str) -> str:
    """Interrupt rank 1 during an update: it is poisoned, and leaves. Returns: the error of the others."""
    comm, base = zcomm.init(timeout=60), Path(folder)
    with grid.small_spans():
        train = Training(mode, base / "drive", clip_norm=None)
        train.run(3)
        if comm.rank == 0:
            with pytest.raises((RuntimeError, OSError)) as told:
                train.run(5)
            return f"{type(told.value).__name__}: {told.value}"
        grid.FaultySwap.arm(Fault("write", STATE, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train.run(5)
        assert grid.FaultySwap.fault is None
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            train.step()
        zcomm.shutdown()
        return ""


@pytest.mark.parametrize("mode", ["nvme, forward", "nvme, backward"])
def test_the_others_learn_of_an_interrupt(run_ranks: Run, tmp_path: Path, mode: str) -> None:
    words, _ = run_ranks(leave, 2, mode, str(tmp_path))
    assert "rank 1" in words and "TimeoutError" not in words, words


# --- a full drive -----------------------------------------------------------------------------------------------------


def full(mode: str, folder: str, rank: int) -> None:
    """Build an optimizer on a drive that lacks a page, on one rank: all ranks raise, and no file is left.

    With enough room the same construction succeeds.
    """
    comm, drive = zcomm.init(timeout=20), Path(folder) / "drive"
    with grid.small_spans():
        train = Training(mode, drive)
        swap = train.opt._parts.swap
        need = max(os.stat(nameless(path)).st_size for path in swap.stats()["paths"])
        train.opt.close()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (need - 4096, before[1]))
        try:
            with pytest.raises(OSError, match="RLIMIT_FSIZE") as told:
                Training(mode, drive)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert told.value.errno == errno.ENOSPC
        assert comm.rank == rank or f"rank {rank}" in str(told.value)
        comm.barrier()
        assert list(drive.iterdir()) == []
        train = Training(mode, drive)
        train.run(5)
        train.opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["nvme, forward", "nvme, backward"])
def test_a_full_drive_ends_construction(run_ranks: Run, tmp_path: Path, mode: str, world_size: int) -> None:
    run_ranks(full, world_size, mode, str(tmp_path), world_size - 1)
