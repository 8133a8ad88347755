"""Offload(atomic=True) and programs: exceptions, interrupts, saves, loads, skipped steps, memory, refusals.

test_mode_faults.py has faults of a step, by mode and place, and test_mode_kills.py interrupts at any line.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import update_grid as grid
import zcomm
import zcomm.zero.assemble
from tiers import long, slow
from update_grid import FAULTY, STATE, WEIGHTS, Fault, Run, Training, Wanted
from zcomm.zero import LossScale, StepUndoneError, full_param
from zcomm.zero.cache.swap import Swap
from zcomm.zero.memory.plan import Settings, plan_memory
from zcomm.zero.options import Precision, Units
from zcomm.zero.schedule import transaction
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.forward import InForward

STEPS = 7
Scene = Callable[[Training, Wanted, Path], None]


def goes_on(train: Training, wanted: Wanted) -> None:
    train.run(STEPS)
    assert (train.bits(), train.counters()) == wanted[STEPS]


def undo(train: Training, fault: Fault, forgets: bool = True) -> None:
    """Run a step, and the next forward, until the fault undoes it. forgets: call zero_grad() then."""
    number = train.number
    grid.arm(train, fault)
    with pytest.raises(StepUndoneError, match=rf"step {number + 1} was undone"):
        train.once()
        train.once()
    if forgets:
        train.opt.zero_grad()


# --- scenes, for each mode --------------------------------------------------------------------------------------------


def first(train: Training, wanted: Wanted, base: Path) -> None:
    """Undo the very first step, and the same when it is run again."""
    for good in (1, 0):
        undo(train, Fault("write", STATE, good=good))
    grid.is_as_before(train, wanted, 0)
    goes_on(train, wanted)


def often(train: Training, wanted: Wanted, base: Path) -> None:
    """Faults in a row, in weights and in state, in reads and in writes."""
    train.reach(FAULTY)
    undo(train, Fault("read", STATE, good=1))
    undo(train, Fault("write", WEIGHTS))
    undo(train, Fault("write", STATE, errno.ENOSPC, good=2))
    undo(train, Fault("read", STATE, refused=True))
    grid.is_as_before(train, wanted, FAULTY)
    goes_on(train, wanted)


def saved(train: Training, wanted: Wanted, base: Path) -> None:
    """Save right after a step was undone; save behind the next step, which is undone as well; load both."""
    train.reach(FAULTY)
    undo(train, Fault("write", STATE, good=1), forgets=False)
    train.opt.save(base / "after")
    train.reach(FAULTY + 1)
    task = train.opt.save(base / "behind", wait=False)
    for good in (2, 1):  # the copy's places are not written before the second step
        undo(train, Fault("write", STATE, good=good))
    train.run(STEPS)
    task.wait()
    assert train.bits() == wanted[STEPS][0]
    for name, number in (("behind", FAULTY + 1), ("after", FAULTY)):
        train.opt.load(base / name)
        assert train.bits() == wanted[number][0], name
    undo(train, Fault("write", STATE))
    train.run(STEPS)
    assert train.bits() == wanted[STEPS][0]


def raises(train: Training, wanted: Wanted, base: Path) -> None:
    """Raise an exception late in backward, on all ranks. zero_grad() is not always called first."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    train.reach(FAULTY)
    updates = train.opt._parts.updates
    for call in (train.opt.zero_grad, lambda: train.opt.save(base / "never"), train.forward, None):
        handle = train.net.blocks[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            train.half()
        handle.remove()
        if call is not None:
            assert not isinstance(updates, InBackward) or updates.pending
            call()
            train.opt.zero_grad()
    zcomm.barrier()
    with pytest.raises(RuntimeError, match=r"ended with an error; call zero_grad\(\) and run it again"):
        train.opt.step()
    train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY][0]
    goes_on(train, wanted)


def interrupted(train: Training, wanted: Wanted, base: Path) -> None:
    """Ctrl-C (which no gathering thread gets), and then a MemoryError, in the update of a tile on one rank."""
    train.reach(FAULTY)
    threaded = type(train.opt._parts.updates) is InForward
    for error in (MemoryError if threaded else KeyboardInterrupt, MemoryError):
        grid.arm(train, fault := Fault("tile", good=1, error=error))
        try:
            train.once()
            train.once()
            pytest.fail("nothing was raised")
        except StepUndoneError as told:
            assert error.__name__ in str(told)
        except KeyboardInterrupt:
            assert error is KeyboardInterrupt and fault.here()
        train.opt.zero_grad()
    grid.is_as_before(train, wanted, FAULTY)
    goes_on(train, wanted)


def settled(train: Training, wanted: Wanted, base: Path) -> None:
    """Undo a step in other calls that run its updates: a pass that does not use all units, a read, a save."""
    train.reach(FAULTY)
    calls: list[Callable[[], Any]] = [
        train.once,
        lambda: train.opt.save(base / "never"),
        train.opt.state_dict,
        lambda: full_param(train.net.blocks[1].weight),
        lambda: train.opt.load_state_dict({}),
        train.opt.step,
    ]
    for number, call in enumerate(calls):
        train.half()
        train.step()
        grid.arm(train, Fault("read", STATE, good=2 if number else 100))
        with pytest.raises(StepUndoneError, match=f"step {FAULTY + 1} was undone"):
            call()
        train.opt.zero_grad()
    if zcomm.world_size() == 1:  # the next call of all ranks undoes the step after an error in a call of one rank
        train.half()
        train.step()
        grid.arm(train, Fault("read", STATE, good=2))
        with pytest.raises(OSError):
            train.opt.join()
        with pytest.raises(StepUndoneError):
            train.forward()
    grid.is_as_before(train, wanted, FAULTY)
    goes_on(train, wanted)


def dropped(train: Training, wanted: Wanted, base: Path) -> None:
    """zero_grad() between backward and step() takes the updates back. Ranks that do not all do so raise."""
    train.reach(FAULTY)
    for _ in range(2):
        train.half()
        train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY][0]
    if zcomm.world_size() > 1 and isinstance(train.opt._parts.updates, InBackward):
        train.half()
        if zcomm.rank() == 1:
            train.opt.zero_grad()
        with pytest.raises(StepUndoneError, match="on some ranks, and on others not"):
            train.opt.step()
        train.opt.zero_grad()
    grid.is_as_before(train, wanted, FAULTY)
    goes_on(train, wanted)


def signalled(train: Training, wanted: Wanted, base: Path) -> None:
    """SIGINT during the comparison of ranks waits until it has ended, so that the step has happened."""
    check_error = transaction.check_error

    def interrupt(comm: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        check_error(comm)

    train.reach(FAULTY)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transaction, "check_error", lambda comm, *words: None if words else interrupt(comm))
        with pytest.raises(KeyboardInterrupt):
            train.once()
            train.opt.state_dict()
    signal.signal(signal.SIGINT, before)
    train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY + 1][0]
    goes_on(train, wanted)


def refused(train: Training, wanted: Wanted, base: Path) -> None:
    """Let step() refuse the second watched step: the first one, of which a forward has used the weights, stays."""
    train.run(1)
    train.half()
    train.opt.param_groups[0]["lr"] = 5e-3
    with pytest.raises(RuntimeError, match="nothing has been changed") as told:
        train.opt.step()
    assert not isinstance(told.value, StepUndoneError)
    train.opt.param_groups[0]["lr"] = 1e-2
    train.opt.zero_grad()
    assert (train.bits(), train.counters()) == wanted[1]


ANY: list[Scene] = [first, often, saved, raises, interrupted, dropped, signalled]


def play(modes: list[str], scenes: list[Scene], folder: str) -> None:
    zcomm.init(timeout=20)
    with grid.small_spans():
        for mode in modes:
            (base := Path(folder) / mode).mkdir(exist_ok=True)
            wanted = grid.reference(mode, "host", base, [0, 1, FAULTY, FAULTY + 1, STEPS])
            for scene in scenes:
                print("scene", mode, scene.__name__, flush=True)
                train = Training(mode, base / "drive")
                scene(train, wanted, base / scene.__name__)
                assert grid.FaultySwap.fault is None
                train.opt.close()
    zcomm.shutdown()


def name_of(value: Any) -> str:
    return getattr(value[-1], "__name__", value[-1]) if isinstance(value, list) else str(value)


def on_one_and_two(place: str, modes: list[str], scenes: list[Scene]) -> list[Any]:
    return [(place, world_size, [f"atomic, {mode}" for mode in modes], scenes) for world_size in (1, 2)]


@pytest.mark.parametrize(
    ("place", "world_size", "modes", "scenes"),
    [
        ("host", 2, ["atomic, backward, bf16"], ANY),
        *(slow("host", 2, [f"atomic, {mode}"], ANY) for mode in ("step", "forward")),
        *(long("host", 1, [f"atomic, {mode}"], ANY) for mode in ("step", "forward", "backward, bf16")),
        slow("device", 2, ["atomic, backward, bf16"], ANY),
        long("device", 1, ["atomic, backward, bf16"], ANY),
        *starmap(long, [*on_one_and_two("device", ["step"], ANY), *on_one_and_two("device", ["forward"], ANY)]),
        *on_one_and_two("host", ["forward", "forward, sums in RAM"], [settled]),
        *on_one_and_two("host", ["backward"], [refused]),
    ],
    ids=name_of,
)
def test_programs(
    run_ranks: Run, tmp_path: Path, place: str, world_size: int, modes: list[str], scenes: list[Scene]
) -> None:
    grid.run_at(place, world_size, run_ranks, play, modes, scenes, str(tmp_path))


# --- gradients that are not finite ------------------------------------------------------------------------------------


class Overflowing(Training):
    """Gradients of some steps are not finite: on all ranks, on one, in one parameter, and two times in a row."""

    def backward(self) -> None:
        handle, number = None, self.number
        if number in (1, 3, 4) and zcomm.rank() == number % zcomm.world_size():
            bad = torch.inf if number == 3 else torch.nan
            handle = self.net.blocks[number].weight.register_hook(lambda grad: grad * bad)
        super().backward()
        if handle is not None:
            handle.remove()


FP16 = {"precision": "fp16", "loss_scale": LossScale(initial_power=10, window=2, hysteresis=1)}
SKIPS: list[tuple[str, dict[str, Any]]] = [
    ("atomic, backward", FP16),
    ("atomic, backward", {"precision": "bf16", "skip_nonfinite": True}),
    ("atomic, backward", {"skip_nonfinite": True}),
    ("atomic, forward", {"clip_norm": None, **FP16}),
    ("atomic, step", {"clip_norm": None, "precision": "bf16", "skip_nonfinite": True}),
    ("atomic, backward", {}),  # nothing is skipped: NaN weights
]


def overflows(folder: str) -> None:
    zcomm.init(timeout=20)
    with grid.small_spans():
        for number, (mode, more) in enumerate(SKIPS):
            (base := Path(folder) / str(number)).mkdir(exist_ok=True)
            wanted = grid.reference(mode, "host", base, range(STEPS + 1), Overflowing, **more)
            train = Overflowing(mode, base / "drive", **more)
            for at in range(STEPS):
                train.once()
                assert (train.bits(), train.counters()) == wanted[at + 1], (number, at)
            updates = train.opt._parts.updates
            assert isinstance(updates, InBackward) == (train.case.update == "backward")
            assert not isinstance(updates, InBackward) or updates.is_on, "updates ran in backward"
            assert (train.opt.skipped_steps == 3) == (number < 5)
            undo(train, Fault("write", WEIGHTS, good=1))
            assert (train.bits(), train.counters()) == wanted[STEPS]
            train.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [long(1), 2])
def test_steps_that_are_skipped(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(overflows, world_size, str(tmp_path))


# --- construction -----------------------------------------------------------------------------------------------------


class CountingSwap(Swap):
    """A swap file that counts the bytes that are written."""

    moved = 0

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        CountingSwap.moved += nbytes
        return super().write(key, ptr, nbytes)


def counted(folder: str) -> None:
    comm = zcomm.init(timeout=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", CountingSwap)
        for number, mode in enumerate([*grid.IN_RAM, "atomic, backward"]):
            base = Path(folder) / str(number)
            train, once = (Training(mode, base, changed={"atomic": atomic}) for atomic in (True, False))
            case, options = grid.MODES[mode]
            opt, plain = train.opt, once.opt
            form, kind, units = opt._parts.state.form, Precision("fp32"), options.get("units", Units())
            more = (kind, form, case.bucket_mb, options.get("prefetch", 1), units, case.share_parameters)
            memory = opt.memory()
            assert plan_memory(train.net, Settings(3, opt.offload, comm.world_size, *more)).memory == memory, mode
            before = plain.memory()
            versions = {tier: row.pop("versions") for tier, row in memory.items()}
            assert memory == before, mode
            swapped, single = (each._parts.swap for each in (opt, plain))
            if isinstance(swapped, Swap):
                sums = opt.memory()["nvme"]["gradients"]
                more_nbytes = swapped.stats()["reserved_nbytes"] - single.stats()["reserved_nbytes"]
                assert more_nbytes == single.stats()["reserved_nbytes"] - sums or more_nbytes >= versions["nvme"]
            assert sum(versions.values()) == sum(row["parameters"] + row["optimizer"] for row in before.values()), mode
            moved = []
            for each in (train, once):
                CountingSwap.moved = 0
                each.run(2)
                each.opt.join()
                moved.append(CountingSwap.moved)
                each.opt.close()
            assert moved[0] == moved[1], "no more bytes move"
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_both_versions_are_counted(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(counted, world_size, str(tmp_path), timeout_s=60)


def throw(error: Exception) -> None:
    raise error


def test_options_are_checked(tmp_path: Path) -> None:
    atomic = zcomm.Offload("nvme", atomic=True)
    for options, text in (
        ({"stage": 2, "offload": atomic}, "by units"),
        ({"stage": 0, "offload": atomic}, "by units"),
        ({"stage": 3, "offload": atomic}, "by units"),
        ({"stage": 3, "offload": replace(atomic, params="nvme", update="backward", gradients="nvme"), "clip_norm": 1.0},
         "clip_norm"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            zcomm.ZeroOptimizer(nn.Linear(8, 8), nvme_path=tmp_path, **options)
    full = OSError(errno.ENOSPC, "disk full", str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", lambda *paths, **options: throw(full))
        with pytest.raises(OSError, match=r"disk full \(Offload\(atomic=True\) keeps two versions") as told:
            zcomm.ZeroOptimizer(nn.Linear(8, 8), stage=3, offload=replace(atomic, params="nvme"), nvme_path=tmp_path)
        assert told.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="atomic=1 must be True or False"):
        zcomm.Offload("nvme", atomic=1)  # type: ignore[arg-type]
    zcomm.shutdown()
