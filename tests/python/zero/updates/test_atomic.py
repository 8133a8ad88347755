"""Offload(atomic=True): a step that an error ends did not happen; training goes on to the bits of a run without it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from test_mode_faults import WIDTH, BadSwap, Fault, Net, bits_of, small_spans
from tiers import long, slow
from zcomm.zero import StepUndoneError
from zero_jobs import Case

Run = Callable[..., list[Any]]
STEPS, FAULTY = 7, 4
STATE, WEIGHTS, SUMS = "state.", "parameters.", "gradients."
BASE = Case(3, "nvme", 0.004, gradients="nvme", atomic=True)
MODES: dict[str, tuple[Case, dict[str, Any]]] = {
    "step": (BASE, {"clip_norm": 0.5}),
    "step, one pass": (replace(BASE, gradients="cpu", precision="bf16"), {}),
    "forward": (replace(BASE, update="forward"), {"clip_norm": 0.5}),
    "forward, sums in RAM": (replace(BASE, update="forward", gradients="cpu", precision="bf16"), {}),
    "backward": (replace(BASE, update="backward"), {}),
    "backward, bf16": (replace(BASE, update="backward", precision="bf16"), {}),
}


class Training:
    """One optimizer, its model, and batches that can be run again."""

    def __init__(self, case: Case, folder: Path, **options: Any) -> None:
        torch.manual_seed(3)
        self.net = options.pop("net", Net)()
        self.optimizer = options.pop("optimizer", "adamw")
        if self.optimizer == "muon":
            for param in self.net.parameters():
                param.requires_grad_(param.ndim == 2)
        options = {"lr": 1e-2, **case.arguments(), **options}
        self.opt: Any = zcomm.ZeroOptimizer(self.net, self.optimizer, nvme_path=folder, **options)

    def forward(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * number + zcomm.rank())
        x = torch.randn(3, WIDTH, generator=generator).to(self.net.rare[0].weight.dtype)
        return self.net(x, number % 2 == 0).float().square().mean()

    def step(self, number: int) -> None:
        self.opt.backward(self.forward(number))
        self.opt.step()
        self.opt.zero_grad()

    def run(self, begin: int, end: int = STEPS) -> None:
        for number in range(begin, end):
            self.step(number)

    def bits(self) -> str:
        return bits_of(self.opt)

    def counters(self) -> list[Any]:
        opt = self.opt
        steps = [group.get("step") for group in opt.param_groups]
        norm = None if opt.grad_norm is None else float(opt.grad_norm).hex()
        return [opt.step_count, opt.updates, opt.skipped_steps, opt.loss_scale, norm, steps]


def wanted_of(
    case: Case, options: dict[str, Any], base: Path, kind: type[Training] = Training
) -> list[tuple[str, list[Any]]]:
    """Return bits and counters after 0, 1, ... steps of a run without a fault, and without transactions."""
    twin = kind(replace(case, atomic=False, update="step"), base / "twin", **options)
    found = [(twin.bits(), twin.counters())]
    for number in range(STEPS):
        twin.step(number)
        found.append((twin.bits(), twin.counters()))
    twin.opt.close()
    return found


# mode, where the fault is armed ("pass": before forward and backward; "step": before step(); "after": after step()),
# the fault, and the call that raises
SCENES: list[tuple[str, str, Fault]] = [
    ("step", "step", Fault("read", STATE, good=2)),
    ("step", "step", Fault("write", STATE, errno.ENOSPC, good=1)),
    ("step", "step", Fault("write", STATE, good=12)),
    ("step", "step", Fault("write", WEIGHTS, errno.ENOSPC, refused=True)),
    ("step, one pass", "step", Fault("write", WEIGHTS, good=1)),
    ("step, one pass", "step", Fault("read", WEIGHTS, good=2)),
    ("forward", "after", Fault("read", STATE, good=2)),
    ("forward", "after", Fault("read", SUMS, good=1)),
    ("forward", "after", Fault("write", STATE, errno.ENOSPC, good=3)),
    ("forward", "after", Fault("write", WEIGHTS, good=1)),
    ("forward, sums in RAM", "after", Fault("write", WEIGHTS, errno.ENOSPC, refused=True)),
    ("forward, sums in RAM", "after", Fault("read", WEIGHTS, good=2)),
    ("backward", "pass", Fault("read", STATE, good=3)),
    ("backward", "pass", Fault("write", STATE, errno.ENOSPC, good=4)),
    ("backward", "pass", Fault("write", WEIGHTS, good=1)),
    ("backward, bf16", "pass", Fault("write", WEIGHTS, errno.ENOSPC, refused=True)),
    ("backward, bf16", "pass", Fault("write", STATE, good=1)),
]


def undone(mode: str, where: str, fault: Fault, base: Path, failing: int, faulty: int = FAULTY) -> None:
    """Undo the step ``faulty`` by a fault on one rank, and run it again."""
    comm, (case, options) = zcomm.init(timeout=20), MODES[mode]
    wanted = wanted_of(case, options, base)
    train = Training(case, base / "drive", **options)
    train.run(0, faulty)

    def arm() -> None:
        if comm.rank == failing:
            BadSwap.arm(fault)

    with pytest.raises(StepUndoneError) as told:
        if where == "pass":
            arm()
        train.opt.backward(train.forward(faulty))
        if where == "step":
            arm()
        train.opt.step()
        train.opt.zero_grad()
        if where == "after":
            arm()
        train.opt.backward(train.forward(faulty + 1))
        train.opt.step()
    assert BadSwap.fault is None, "it has come"
    words = str(told.value)
    assert f"rank {failing}" in words or (comm.rank == failing and "/drive/data" in words), words
    assert f"step {faulty + 1} was undone" in words and told.value.step == faulty + 1
    assert train.counters() == wanted[faulty][1]
    train.opt.zero_grad()
    assert train.bits() == wanted[faulty][0], "it did not happen"
    train.run(faulty)
    assert (train.bits(), train.counters()) == wanted[-1]
    train.opt.close()


def all_undone(scenes: list[tuple[str, str, Fault]], folder: str, failing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        for number, (mode, where, fault) in enumerate(scenes):
            print("scene", mode, where, fault, flush=True)
            (Path(folder) / str(number)).mkdir(exist_ok=True)
            undone(mode, where, fault, Path(folder) / str(number), failing)
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [long(1), 2])
@pytest.mark.parametrize("place", [slow("step"), "forward", slow("backward")])
def test_a_fault_of_the_drive_undoes_the_step(run_ranks: Run, tmp_path: Path, place: str, world_size: int) -> None:
    scenes = [scene for scene in SCENES if scene[0].startswith(place)]
    run_ranks(all_undone, world_size, scenes, str(tmp_path), world_size - 1)
