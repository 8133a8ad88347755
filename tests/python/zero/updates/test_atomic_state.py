"""Offload(atomic=True): counters of a step, state in RAM, gradients that are not finite, memory, refusals."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.layout.tiles
from interrupts import interrupted_at
from test_atomic import BASE, FAULTY, STEPS, Training, wanted_of
from test_atomic_programs import arm, is_as_before, is_undone, reach
from test_mode_faults import WIDTH, Fault, Net, small_spans
from tiers import slow
from zcomm.zero import LossScale, StepUndoneError
from zcomm.zero.cache.swap import Swap
from zcomm.zero.memory_plan import Settings, plan_memory
from zcomm.zero.optim_state.ram import ShardState
from zcomm.zero.options import Precision, Units
from zcomm.zero.schedule.backward import InBackward
from zero_jobs import Case

Run = Callable[..., list[Any]]
BACKWARD = replace(BASE, update="backward")
FORWARD = replace(BASE, update="forward")


@dataclass
class Failing:
    """Fails in the update of a tile, once, after ``left`` others, also without a drive."""

    left: int = -1

    def install(self, patch: pytest.MonkeyPatch) -> None:
        step_tile = ShardState._step_tile

        def fails(*args: Any) -> None:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no room")
            step_tile(*args)

        patch.setattr(ShardState, "_step_tile", fails)


class Placed(Training):
    """Offload with places that a Case does not have."""

    def __init__(self, case: Case, folder: Path, **options: Any) -> None:
        places = options.pop("places", {})
        if places:
            usual = {"optimizer": "nvme", "params": "nvme", "gradients": case.gradients, "update": case.update}
            options["offload"] = zcomm.Offload(**{**usual, "atomic": case.atomic, **places})
        super().__init__(case, folder, **options)


class Wide(Net):
    """The net with a Linear that is gathered by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2100, bias=False)

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        found: torch.Tensor = self.head(super().forward(x, rarely))
        return found


def some(name: str, param: nn.Parameter) -> str:
    return "nvme" if "weight" in name else "cpu"


def half(name: str, param: nn.Parameter) -> str:
    return "cpu" if name.startswith(("blocks.1", "blocks.2", "rare")) else "nvme"


IN_RAM: dict[str, tuple[Case, dict[str, Any]]] = {
    "fraction": (replace(BACKWARD, fraction=0.4), {}),
    "optimizer in RAM": (FORWARD, {"places": {"optimizer": "cpu"}}),
    "weights in RAM": (BACKWARD, {"places": {"params": half}}),
    "both by parameter": (FORWARD, {"places": {"params": half, "optimizer": some}}),
    "rows": (BASE, {"net": Wide, "units": Units(max_bytes="160KiB", rows=True), "prefetch": 3}),
    "all in RAM": (
        replace(FORWARD, gradients="cpu", share_parameters=False),
        {"places": {"params": None, "optimizer": None, "gradients": None}},
    ),
}
KINDS: dict[str, tuple[Case, dict[str, Any]]] = {
    "momentum": (BACKWARD, {"optimizer": "sgd", "momentum": 0.9, "dampening": 0.5}),
    "nadam": (BACKWARD, {"optimizer": torch.optim.NAdam}),
    "8bit": (FORWARD, {"optimizer": "adamw", "state_dtype": "8bit"}),
    "fp16": (BACKWARD, {"precision": "fp16", "loss_scale": 64.0}),
    "lamb": (BASE, {"optimizer": "lamb"}),
    "muon": (BASE, {"optimizer": "muon"}),
}


def play(cases: dict[str, tuple[Case, dict[str, Any]]], folder: str, failing: int) -> None:
    """Undo the first step, and step FAULTY, which runs its updates at the mode's own moment; run each again."""
    comm = zcomm.init(timeout=20)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        patch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 256)  # 8-bit state has blocks of that
        fault = Failing()
        fault.install(patch)
        for number, (name, (case, options)) in enumerate(cases.items()):
            print("scene", name, flush=True)
            base = Path(folder) / str(number)
            base.mkdir(exist_ok=True)
            wanted = wanted_of(case, options, base, Placed)
            train = Placed(case, base / "drive", **options)
            for at in (0, FAULTY):
                reach(train, at)
                fault.left = 3 if comm.rank == failing else -1
                is_undone(train, at)
                train.opt.zero_grad()
                assert train.bits() == wanted[at][0]
            is_as_before(train, wanted, FAULTY)
            train.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_in_ram(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(play, world_size, IN_RAM, str(tmp_path), world_size - 1)


@pytest.mark.parametrize("world_size", [slow(1), slow(2)])
def test_what_optimizers_count(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(play, world_size, KINDS, str(tmp_path), world_size - 1)


# --- gradients that are not finite ------------------------------------------------------------------------------------


class Overflowing(Training):
    """Gradients of some steps are not finite: on all ranks, on one, in one parameter, and two times in a row."""

    def step(self, number: int) -> None:
        loss = self.forward(number)
        handle = None
        if number in (1, 3, 4) and zcomm.rank() == number % zcomm.world_size():
            bad = torch.inf if number == 3 else torch.nan
            handle = self.net.blocks[number].weight.register_hook(lambda grad: grad * bad)
        self.opt.backward(loss)
        if handle is not None:
            handle.remove()
        self.opt.step()
        self.opt.zero_grad()


SKIPS: list[tuple[Case, dict[str, Any]]] = [
    (BACKWARD, {"precision": "fp16", "loss_scale": LossScale(initial_power=10, window=2, hysteresis=1)}),
    (BACKWARD, {"precision": "bf16", "skip_nonfinite": True}),
    (BACKWARD, {"skip_nonfinite": True}),
    (FORWARD, {"precision": "fp16", "loss_scale": LossScale(initial_power=10, window=2, hysteresis=1)}),
    (BASE, {"precision": "bf16", "skip_nonfinite": True}),
    (BACKWARD, {}),  # nothing is skipped: NaN weights
]


def overflows(folder: str, failing: int) -> None:
    zcomm.init(timeout=20)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        for number, (case, options) in enumerate(SKIPS):
            base = Path(folder) / str(number)
            base.mkdir(exist_ok=True)
            wanted = wanted_of(case, options, base, Overflowing)
            train = Overflowing(case, base / "drive", **options)
            for at in range(STEPS):
                train.step(at)
                assert (train.bits(), train.counters()) == wanted[at + 1], (number, at)
            updates = train.opt._parts.updates
            assert isinstance(updates, InBackward) == (case.update == "backward")
            assert not isinstance(updates, InBackward) or updates.is_on, "updates ran in backward"
            assert (train.opt.skipped_steps == 3) == (number < 5)
            arm(failing, Fault("write", "parameters.", good=1))
            is_undone(train, STEPS)
            train.opt.zero_grad()
            assert (train.bits(), train.counters()) == wanted[STEPS]
            train.opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_that_are_skipped(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(overflows, world_size, str(tmp_path), world_size - 1)


# --- interrupts at any line -------------------------------------------------------------------------------------------

ANYWHERE = [("step", BASE), ("forward", FORWARD), ("backward", BACKWARD)]


@pytest.mark.parametrize(("name", "case"), ANYWHERE)
def test_an_interrupt_at_any_line(tmp_path: Path, name: str, case: Case) -> None:
    """The step happened, or it did not: then it is run again."""
    zcomm.init(timeout=20)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        wanted = wanted_of(case, {}, tmp_path)
        train = Training(case, tmp_path / "drive")
        reach(train, FAULTY)
        train.opt.save(tmp_path / "good")
        moment, happened = 3, set()
        files = ("zcomm/zero",)
        while interrupted_at(moment, lambda: whole_step(train), files):
            moment = moment * 5 // 4 + 1
            train.opt.zero_grad()
            try:
                found = train.bits()
            except StepUndoneError:
                found = train.bits()
            assert found in (wanted[FAULTY][0], wanted[FAULTY + 1][0]), moment
            done = found == wanted[FAULTY + 1][0]
            assert train.opt.step_count == FAULTY + done, moment
            happened.add(done)
            if done:
                train.opt.load(tmp_path / "good")
        assert False in happened  # whether one comes after the commit is a matter of threads
        train.opt.load(tmp_path / "good")
        train.run(FAULTY)
        assert train.bits() == wanted[STEPS][0]
        train.opt.close()
    zcomm.shutdown()


def whole_step(train: Training) -> None:
    """Run a step and its deferred updates."""
    train.opt.backward(train.forward(FAULTY))
    train.opt.step()
    train.opt.join()


# --- construction -----------------------------------------------------------------------------------------------------


class CountingSwap(Swap):
    """A swap file that counts the bytes that are written."""

    moved = 0

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        CountingSwap.moved += nbytes
        return super().write(key, ptr, nbytes)


def counted(folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", CountingSwap)
        count_all(folder)


def count_all(folder: str) -> None:
    comm = zcomm.init(timeout=20)
    for number, (name, (case, options)) in enumerate(itertools.chain(IN_RAM.items(), [("drive", (BACKWARD, {}))])):
        base = Path(folder) / str(number)
        train, once = (Placed(replace(case, atomic=atomic), base, **options) for atomic in (True, False))
        opt, plain = train.opt, once.opt
        form, kind = opt._parts.state.form, Precision("fp32")
        settings = Settings(
            3,
            opt.offload,
            comm.world_size,
            kind,
            form,
            case.bucket_mb,
            options.get("prefetch", 1),
            options.get("units", Units()),
            case.share_parameters,
        )
        memory = opt.memory()
        assert plan_memory(train.net, settings).memory == memory, name
        before = plain.memory()
        versions = {tier: row.pop("versions") for tier, row in memory.items()}
        assert memory == before, name
        swapped, single = (each._parts.swap for each in (opt, plain))
        if isinstance(swapped, Swap):
            sums = opt.memory()["nvme"]["gradients"]
            more = swapped.stats()["reserved_nbytes"] - single.stats()["reserved_nbytes"]
            assert more == single.stats()["reserved_nbytes"] - sums or more >= versions["nvme"]
        assert sum(versions.values()) == sum(row["parameters"] + row["optimizer"] for row in before.values()), name
        moved = []
        for each in (train, once):
            CountingSwap.moved = 0
            each.run(0, 2)
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


def test_what_is_refused(tmp_path: Path) -> None:
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
