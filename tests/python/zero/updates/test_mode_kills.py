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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import zcomm
import zcomm.zero.assemble
from interrupts import interrupted_at, lines_of
from swap_files import nameless
from test_mode_faults import MODES, STATE, STEPS, SUMS, WEIGHTS, Training, small_spans, wanted_bits
from tiers import slow
from zcomm.zero.cache.swap import Swap
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.forward import InForward

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Kill:
    """The death of a rank at the ``good``-th following operation: "read", "write", or the call of a method."""

    what: Any
    key: str = ""
    good: int = 0


class DeadlySwap(Swap):
    """A swap file with an operation that may be the last one of the process."""

    kill: Kill | None = None
    left = 0

    @classmethod
    def arm(cls, kill: Kill) -> None:
        cls.kill, cls.left = kill, kill.good

    def _at(self, what: str, key: str) -> None:
        kill = DeadlySwap.kill
        if kill is not None and kill.what == what and key.startswith(kill.key):
            DeadlySwap.left -= 1
            if DeadlySwap.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        self._at("read", key)
        return super().read(key, ptr, nbytes)

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        self._at("write", key)
        return super().write(key, ptr, nbytes)


def arm(kill: Kill) -> None:
    """Let this process die at ``kill``. It never goes on, so that nothing is put back."""
    if isinstance(kill.what, str):
        DeadlySwap.arm(kill)
        return
    owner, name = kill.what

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, name, die)


def save(train: Training, base: Path) -> None:
    train.opt.save(base / "good")


def load(train: Training, base: Path) -> None:
    train.opt.load(base / "good")


def go_on(train: Training, base: Path) -> None:
    train.run(STEPS)


# mode, action, the death
KILLS: list[tuple[str, Callable[[Training, Path], None], Kill]] = [
    ("nvme, step", go_on, Kill("write", SUMS, 1)),
    ("nvme, step", go_on, Kill("write", STATE, 2)),
    ("nvme, forward", go_on, Kill("write", STATE, 1)),
    ("nvme, forward", go_on, Kill("write", WEIGHTS)),
    ("nvme, forward", go_on, Kill("read", SUMS, 1)),
    ("nvme, forward", go_on, Kill((InForward, "_defer"))),
    ("nvme, forward", save, Kill("write", STATE, 2)),
    ("nvme, forward", load, Kill("write", WEIGHTS, 9)),
    ("nvme, backward", go_on, Kill("write", STATE, 1)),
    ("nvme, backward", go_on, Kill("write", WEIGHTS, 1)),
    ("nvme, backward", go_on, Kill((InBackward, "_finish"))),
    ("nvme, backward", go_on, Kill((InBackward, "_ended"))),
    ("nvme, backward", go_on, Kill((SumRing, "begin_pass"))),
    ("nvme, backward", save, Kill("read", WEIGHTS, 1)),
    ("nvme, backward", load, Kill("write", WEIGHTS, 3)),
]


def die(number: int, folder: str, victim: int) -> tuple[str, float]:
    """Train until a rank dies. Returns: its error on another rank, and when it came."""
    comm, base = zcomm.init(timeout=60), Path(folder)
    mode, act, kill = KILLS[number]
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        patch.setattr(zcomm.zero.assemble, "Swap", DeadlySwap)
        train = Training(MODES[mode], base / "drive", clip_norm=None)
        train.run(2)
        train.opt.save(base / "good")
        train.run(3)
        if comm.rank == victim:
            (base / "armed").write_text(str(time.monotonic()))
            arm(kill)
        with pytest.raises(zcomm.PeerLost) as told:
            act(train, base)
            pytest.fail("no rank has died")
        assert told.value.rank == victim
        return str(told.value), time.monotonic()


def load_all(folders: list[str], modes: list[str]) -> tuple[str, list[str]]:
    """Load the checkpoints, and train on. Returns: the bits of an undisturbed run, and those that were found."""
    zcomm.init(timeout=60)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        wanted = wanted_bits(MODES["nvme, step"], Path(folders[0]), clip_norm=None)
        for folder, mode in zip(folders, modes, strict=True):
            train = Training(MODES[mode], Path(folder) / "drive", clip_norm=None)
            train.opt.load(Path(folder) / "good")
            train.number = train.opt.step_count
            train.run(STEPS)
            found.append(train.bits())
            train.opt.close()
    return wanted, found


@pytest.mark.leaves_swap
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_kill_9_in_each_mode(start_ranks_in: Any, run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    folders = []
    for number in range(len(KILLS)):
        (folder := tmp_path / str(number)).mkdir()
        folders.append(str(folder))
        results = start_ranks_in(die, world_size, number, str(folder), world_size - 1).join(60)
        assert results[-1].exitcode == -9, f"{KILLS[number]}: {results[-1].describe()}"
        for result in results[:-1]:
            assert result.error is None, f"{KILLS[number]}: {result.describe()}"
            words, when = result.value
            assert "rank 1" in words and when - float((folder / "armed").read_text()) < 20, words
    for wanted, found in run_ranks(load_all, world_size, folders, [mode for mode, _, _ in KILLS]):
        assert found == [wanted] * len(found), [each == wanted for each in found]


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------

FILES = ("python/zcomm/zero/",)


def interrupt(mode: str, folder: str, moments: int) -> dict[str, int]:
    """Interrupt a step at lines of its code. Returns: how often it was not made, made, or ended half way."""
    zcomm.init(timeout=20)
    base, counts = Path(folder), {"before": 0, "after": 0, "poisoned": 0}
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        train = Training(MODES[mode], base / "drive")

        def one() -> None:
            train.forward()
            train.backward()
            train.step()

        train.run(3)
        train.opt.save(base / "good")
        bits = {train.bits(): "before"}
        lines = lines_of(one, FILES)
        train.opt.zero_grad()
        bits[train.bits()] = "after"
        for number in range(moments):
            train.opt.load(base / "good")
            train.number = 3
            interrupted_at(1 + number * (lines + 9) // moments, one, FILES)
            try:
                if train.opt._parts.updates.pending:
                    train.opt.step()
                train.opt.zero_grad()
                counts[bits[train.bits()]] += 1
            except RuntimeError as error:
                assert "load a checkpoint" in str(error)
                counts["poisoned"] += 1
        train.opt.load(base / "good")
        one()
        train.opt.zero_grad()
        assert bits[train.bits()] == "after"
        train.opt.close()
    zcomm.shutdown()
    return counts


@pytest.mark.timeout_s(280)
@pytest.mark.parametrize("moments", [60, pytest.param(240, marks=pytest.mark.long)])
@pytest.mark.parametrize("mode", [slow("nvme, step"), "nvme, forward", slow("nvme, backward")])
def test_an_interrupt_leaves_no_half_step(tmp_path: Path, mode: str, moments: int) -> None:
    counts = interrupt(mode, str(tmp_path), moments)
    assert counts["before"] and counts["after"], counts
    assert counts["poisoned"] or mode == "nvme, forward", counts


def leave(mode: str, key: str, folder: str) -> str:
    """Interrupt rank 1 during an update: it is poisoned, and leaves. Returns: the error of the others."""
    comm, base = zcomm.init(timeout=60), Path(folder)

    class Interrupted(Swap):
        armed = False

        def write(self, name: str, ptr: int, nbytes: int) -> Any:
            if Interrupted.armed and name.startswith(key):
                Interrupted.armed = False
                raise KeyboardInterrupt
            return super().write(name, ptr, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        patch.setattr(zcomm.zero.assemble, "Swap", Interrupted)
        train = Training(MODES[mode], base / "drive", clip_norm=None)
        train.run(3)
        if comm.rank == 0:
            with pytest.raises((RuntimeError, OSError)) as told:
                train.run(STEPS)
            return f"{type(told.value).__name__}: {told.value}"
        Interrupted.armed = True
        with pytest.raises(KeyboardInterrupt):
            train.run(STEPS)
        assert not Interrupted.armed
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            train.step()
        zcomm.shutdown()
        return ""


@pytest.mark.parametrize(("mode", "key"), [("nvme, forward", STATE), ("nvme, backward", STATE)])
def test_the_others_learn_of_an_interrupt(run_ranks: Run, tmp_path: Path, mode: str, key: str) -> None:
    words, _ = run_ranks(leave, 2, mode, key, str(tmp_path))
    assert "rank 1" in words and "TimeoutError" not in words, words


# --- a full drive -----------------------------------------------------------------------------------------------------


def full(mode: str, folder: str, rank: int) -> None:
    """Build an optimizer on a drive that lacks a page, on one rank: all ranks raise, and no file is left.

    With enough room the same construction succeeds.
    """
    comm, drive = zcomm.init(timeout=20), Path(folder) / "drive"
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        train = Training(MODES[mode], drive)
        swap = train.opt._parts.swap
        need = max(os.stat(nameless(path)).st_size for path in swap.stats()["paths"])
        train.opt.close()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (need - 4096, before[1]))
        try:
            with pytest.raises(OSError, match="RLIMIT_FSIZE") as told:
                Training(MODES[mode], drive)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert told.value.errno == errno.ENOSPC
        assert comm.rank == rank or f"rank {rank}" in str(told.value)
        comm.barrier()
        assert list(drive.iterdir()) == []
        train = Training(MODES[mode], drive)
        train.run(STEPS)
        train.opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", ["nvme, forward", "nvme, backward"])
def test_a_full_drive_ends_construction(run_ranks: Run, tmp_path: Path, mode: str, world_size: int) -> None:
    run_ranks(full, world_size, mode, str(tmp_path), world_size - 1)
