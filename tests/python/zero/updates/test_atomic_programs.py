"""Offload(atomic=True) and programs with exceptions, interrupts, saves, loads, zero_grad()."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zcomm.zero.optim_state.ram
from test_atomic import FAULTY, MODES, STATE, STEPS, WEIGHTS, Training, wanted_of
from test_mode_faults import BadSwap, Fault, small_spans
from tiers import slow
from zcomm.zero import StepUndoneError, full_param
from zcomm.zero.optim_state.ram import ShardState
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.forward import InForward

Run = Callable[..., list[Any]]
Wanted = list[tuple[str, list[Any]]]
Scene = Callable[[Training, Wanted, Path, int], None]


def is_as_before(train: Training, wanted: Wanted, number: int) -> None:
    """Check that training is where it was before step ``number``, and run to the end."""
    assert train.counters() == wanted[number][1]
    train.opt.zero_grad()
    assert train.bits() == wanted[number][0]
    goes_on(train, wanted, number)


def goes_on(train: Training, wanted: Wanted, number: int) -> None:
    train.run(number)
    assert (train.bits(), train.counters()) == wanted[STEPS]


def reach(train: Training, number: int) -> None:
    """Run to step ``number``, with all updates made."""
    train.run(train.opt.step_count, number)
    full_param(train.net.rare[0].weight)


def arm(failing: int, fault: Fault) -> None:
    if zcomm.rank() == failing:
        BadSwap.arm(fault)


def is_undone(train: Training, number: int) -> None:
    """Run a step, and the next forward, until the fault that is armed undoes it."""
    with pytest.raises(StepUndoneError, match=rf"step {number + 1} was undone"):
        train.step(number)
        train.step(number + 1)


# --- scenes, for each mode --------------------------------------------------------------------------------------------


def first(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Undo the very first step, and the same when it is run again."""
    for good in (1, 0):
        arm(failing, Fault("write", STATE, good=good))
        is_undone(train, 0)
        train.opt.zero_grad()
    is_as_before(train, wanted, 0)


def often(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Faults in a row, in weights and in state, in reads and in writes."""
    reach(train, FAULTY)
    for fault in (
        Fault("read", STATE, good=1),
        Fault("write", WEIGHTS),
        Fault("write", STATE, errno.ENOSPC, good=2),
        Fault("read", STATE, refused=True),
    ):
        arm(failing, fault)
        is_undone(train, FAULTY)
        train.opt.zero_grad()
    is_as_before(train, wanted, FAULTY)


def saved(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Save right after a step was undone; save behind the next step, which is undone as well; load both."""
    reach(train, FAULTY)
    arm(failing, Fault("write", STATE, good=1))
    is_undone(train, FAULTY)
    train.opt.save(base / "after")
    reach(train, FAULTY + 1)
    task = train.opt.save(base / "behind", wait=False)
    for good in (2, 1):  # the copy's places are not written before the second step
        arm(failing, Fault("write", STATE, good=good))
        is_undone(train, FAULTY + 1)
        train.opt.zero_grad()
    train.run(FAULTY + 1)
    task.wait()
    assert train.bits() == wanted[STEPS][0]
    for name, number in (("behind", FAULTY + 1), ("after", FAULTY)):
        train.opt.load(base / name)
        assert train.bits() == wanted[number][0], name
    arm(failing, Fault("write", STATE))
    is_undone(train, FAULTY)
    train.opt.zero_grad()
    train.run(FAULTY)
    assert train.bits() == wanted[STEPS][0]


def raises(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Raise an exception late in backward, on all ranks. zero_grad() is not always called first."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    reach(train, FAULTY)
    updates = train.opt._parts.updates
    for call in (train.opt.zero_grad, lambda: train.opt.save(base / "never"), lambda: train.forward(0)):
        handle = train.net.blocks[0].weight.register_hook(fail)
        with pytest.raises(ValueError, match="in backward"):
            train.opt.backward(train.forward(FAULTY))
        handle.remove()
        assert not isinstance(updates, InBackward) or updates.pending or updates._phase == 0
        call()
        train.opt.zero_grad()
    handle = train.net.blocks[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        train.opt.backward(train.forward(FAULTY))
    handle.remove()
    zcomm.barrier()
    with pytest.raises(RuntimeError, match=r"ended with an error; call zero_grad\(\) and run it again"):
        train.opt.step()
    train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY][0]
    goes_on(train, wanted, FAULTY)


def interrupted(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Ctrl-C (which no gathering thread gets), and then a MemoryError, in the update of a tile on one rank."""
    step_tile = ShardState._step_tile
    reach(train, FAULTY)
    threaded = type(train.opt._parts.updates) is InForward
    for error in (MemoryError("other") if threaded else KeyboardInterrupt(), MemoryError("no room")):
        left = [2]

        def fails(*args: Any, left: list[int] = left, error: BaseException = error) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise error
            step_tile(*args)

        with pytest.MonkeyPatch.context() as patch:
            if zcomm.rank() == failing:
                patch.setattr(ShardState, "_step_tile", fails)
            try:
                train.step(FAULTY)
                train.step(FAULTY + 1)
                pytest.fail("nothing was raised")
            except StepUndoneError as told:
                assert type(error).__name__ in str(told)
            except KeyboardInterrupt:
                assert isinstance(error, KeyboardInterrupt) and zcomm.rank() == failing
        train.opt.zero_grad()
    is_as_before(train, wanted, FAULTY)


def settled(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """Undo a step in other calls that run its updates: a pass that does not use all units, a read, a save."""
    reach(train, FAULTY)
    spans, last = train.opt._parts.state.kinds[0]._swapped, set(train.opt._parts.geometry.unit_buckets[-1])
    before_last = sum(bucket not in last for bucket, _, _ in spans)
    calls: list[Callable[[], Any]] = [
        lambda: train.step(FAULTY + 1),
        lambda: train.opt.save(base / "never"),
        train.opt.state_dict,
        lambda: full_param(train.net.blocks[1].weight),
        lambda: train.opt.load_state_dict({}),
        train.opt.step,
    ]
    for number, call in enumerate(calls):
        train.opt.backward(train.forward(FAULTY))
        train.opt.step()
        arm(failing, Fault("read", STATE, good=before_last if number == 0 else 2))
        with pytest.raises(StepUndoneError, match=f"step {FAULTY + 1} was undone"):
            call()
        train.opt.zero_grad()
    if zcomm.world_size() == 1:
        joined(train)
    is_as_before(train, wanted, FAULTY)


def joined(train: Training) -> None:
    """Meet a fault in a call of one rank: the next call of all undoes the step."""
    train.opt.backward(train.forward(FAULTY))
    train.opt.step()
    arm(0, Fault("read", STATE, good=2))
    with pytest.raises(OSError):
        train.opt.join()
    with pytest.raises(StepUndoneError):
        train.forward(FAULTY + 1)


def dropped(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """zero_grad() between backward and step() takes the updates back. Ranks that do not all do so raise."""
    reach(train, FAULTY)
    for _ in range(2):
        train.opt.backward(train.forward(FAULTY))
        train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY][0]
    if zcomm.world_size() > 1 and isinstance(train.opt._parts.updates, InBackward):
        train.opt.backward(train.forward(FAULTY))
        if zcomm.rank() == failing:
            train.opt.zero_grad()
        with pytest.raises(StepUndoneError, match="on some ranks, and on others not"):
            train.opt.step()
        train.opt.zero_grad()
    is_as_before(train, wanted, FAULTY)


def signalled(train: Training, wanted: Wanted, base: Path, failing: int) -> None:
    """SIGINT during the comparison of ranks waits until it has ended, so that the step has happened."""
    import zcomm.zero.schedule.transaction as module

    check_error = module.check_error

    def interrupt(comm: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        check_error(comm)

    reach(train, FAULTY)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_error", lambda comm, *words: None if words else interrupt(comm))
        with pytest.raises(KeyboardInterrupt):
            train.step(FAULTY)
            train.opt.state_dict()
    signal.signal(signal.SIGINT, before)
    train.opt.zero_grad()
    assert train.bits() == wanted[FAULTY + 1][0]
    goes_on(train, wanted, FAULTY + 1)


ANY: dict[str, Scene] = {"first": first, "often": often, "saved": saved, "raises": raises, "interrupted": interrupted}
ANY |= {"dropped": dropped, "signalled": signalled}


def play(modes: list[str], scenes: list[str], folder: str, failing: int) -> None:
    zcomm.init(timeout=20)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        for mode in modes:
            case, options = MODES[mode]
            base = Path(folder) / mode
            base.mkdir(exist_ok=True)
            wanted = wanted_of(case, options, base)
            for name in scenes:
                print("scene", mode, name, flush=True)
                train = Training(case, base / "drive", **options)
                {**ANY, "settled": settled}[name](train, wanted, base / name, failing)
                assert BadSwap.fault is None
                train.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("mode", [slow("step"), slow("forward"), "backward, bf16"])
def test_what_programs_do(run_ranks: Run, tmp_path: Path, mode: str, world_size: int) -> None:
    run_ranks(play, world_size, [mode], list(ANY), str(tmp_path), world_size - 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_updates_that_wait_are_undone(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    modes = ["forward", "forward, sums in RAM"]
    run_ranks(play, world_size, modes, ["settled"], str(tmp_path), world_size - 1)


def refused(base: str) -> None:
    """Let step() refuse the second watched step: the first one, of which a forward has used the weights, stays."""
    zcomm.init(timeout=20)
    case, options = MODES["backward"]
    wanted = wanted_of(case, options, Path(base))
    train = Training(replace(case, atomic=True), Path(base) / "drive", **options)
    train.run(0, 1)
    train.opt.backward(train.forward(1))
    train.opt.param_groups[0]["lr"] = 5e-3
    with pytest.raises(RuntimeError, match="nothing has been changed") as told:
        train.opt.step()
    assert not isinstance(told.value, StepUndoneError)
    train.opt.param_groups[0]["lr"] = 1e-2
    train.opt.zero_grad()
    assert (train.bits(), train.counters()) == wanted[1]
    train.opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_that_is_refused_undoes_none_before_it(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(refused, world_size, str(tmp_path))
