"""The policy of updates that a program gets, by options and by the place of its weights and state."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import simulated
import zcomm
from zcomm.zero import Offload
from zcomm.zero.layout.sections import NoModel
from zcomm.zero.schedule.backward import InBackward
from zcomm.zero.schedule.behind import Behind
from zcomm.zero.schedule.forward import InForward
from zcomm.zero.schedule.from_slots import FromSlots
from zcomm.zero.schedule.legality import Place, choose_policy
from zcomm.zero.schedule.scheduler import UpdateScheduler

UNITS, DRIVE = Place(by_unit=True), Place(by_unit=True, on_drive=True)
WHOLE, RAM, PARTLY = Place(on_device=True), Place(), Place(partly=True)
ALONE = Place(on_device=True, one_rank=True)
NAMES = {
    UpdateScheduler: "step", InForward: "forward", Behind: "behind", InBackward: "backward", FromSlots: "slots",
}  # fmt: skip
Given = dict[str, Any]


def chosen(given: Given, place: Place, model: nn.Module, needs: str = "", **rule: Any) -> str:
    """Return the policy. No optimizer is built."""
    kind = SimpleNamespace(**{"name": "adamw", "sums": 0, "whole_matrices": (), "takes_half": True, **rule})
    train: Any = SimpleNamespace(offload=zcomm.Offload("cpu", **given), needs_all_gradients=needs, rule=kind)
    return choose_policy(model, train, place, 0)


@pytest.mark.parametrize(
    ("given", "place", "policy"),
    [
        ({"update": "step"}, UNITS, "step"),
        ({"update": "forward"}, UNITS, "forward"),
        ({"update": "forward"}, WHOLE, "behind"),
        ({"step_behind_forward": True}, WHOLE, "behind"),
        ({"step_behind_forward": True}, UNITS, "forward"),
        ({"update": "backward", "gradients": "nvme"}, UNITS, "backward"),
        ({"update": "backward"}, ALONE, "slots"),
        ({"update": "auto"}, ALONE, "step"),
        ({}, DRIVE, "forward"),
        ({"update": "auto"}, DRIVE, "forward"),
        ({"update": "auto", "gradients": "nvme"}, DRIVE, "forward"),
        ({"update": "auto", "step_behind_forward": True}, DRIVE, "forward"),
        ({"update": "auto", "gradients": "nvme"}, UNITS, "step"),
        ({"update": "auto"}, WHOLE, "step"),
        ({"update": "auto"}, RAM, "step"),
        ({"update": "auto"}, PARTLY, "step"),
        ({"update": "step"}, DRIVE, "step"),
    ],
)
def test_a_policy_follows_option_and_place(given: Given, place: Place, policy: str) -> None:
    assert chosen(given, place, nn.Linear(2, 2)) == policy


@pytest.mark.parametrize(
    ("given", "place", "error", "words"),
    [
        ({"update": "forward"}, RAM, ValueError, "update='forward' needs stage=3 by units .* or the model itself on a"),
        ({"step_behind_forward": True}, RAM, ValueError, "step_behind_forward=True needs stage=3 by units"),
        ({"update": "backward", "gradients": "nvme"}, RAM, ValueError, "update='backward' needs stage=3 by units"),
        ({"update": "backward"}, WHOLE, ValueError, "weights that are whole on a device, needs one rank"),
        ({"update": "backward", "gradients": "nvme"}, ALONE, ValueError, "keeps no gradients, but gradients='nvme'"),
        ({"update": "backward"}, UNITS, ValueError, "update='backward' needs gradients='nvme'"),
        ({"update": "forward", "gradients": "nvme"}, WHOLE, ValueError, "with gradients='nvme'"),
    ],
)
def test_a_policy_by_name_raises_where_it_is_illegal(
    given: Given, place: Place, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        chosen(given, place, nn.Linear(2, 2))


def test_programs_that_wait_for_all_gradients_or_whole_matrices() -> None:
    model, sums = nn.Linear(2, 2), {"gradients": "nvme"}
    assert chosen({"update": "auto", **sums}, DRIVE, model, "clip_norm=1.0") == "forward"
    with pytest.raises(ValueError, match=r"clip_norm=1\.0, which needs all gradients"):
        chosen({"update": "backward", **sums}, UNITS, model, "clip_norm=1.0")
    for rule in ({"sums": 2}, {"whole_matrices": (0,)}):
        assert chosen({"update": "auto"}, DRIVE, model, **rule) == "step"
        with pytest.raises(NotImplementedError, match="needs whole parameters or matrices"):
            chosen({"update": "forward"}, UNITS, model, **rule)
    assert chosen({"update": "forward"}, WHOLE, model, sums=2) == "behind", "its thread measures nothing"
    with pytest.raises(NotImplementedError, match="is not available"):
        chosen({"update": "forward"}, WHOLE, model, whole_matrices=(0,))
    with pytest.raises(ValueError, match="needs the model itself: its modules wait"):
        chosen({"update": "forward"}, WHOLE, NoModel())


@pytest.mark.parametrize(
    ("place", "more", "words"),
    [
        (RAM, {}, r"step\(\): weights are whole in memory, so a program could read them"),
        (WHOLE, {}, r"step\(\): parameters that a program keeps in a list could be read before"),
        (PARTLY, {}, r"step\(\): some weights or optimizer state stay on the device"),
        (UNITS, {}, r"step\(\): no trained weights or optimizer state are on a drive"),
        (DRIVE, {"model": nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))}, r"step\(\): 0 has max_norm, which changes"),
        (DRIVE, {"name": "lamb", "sums": 2}, r"step\(\): lamb needs whole parameters or matrices of all ranks"),
    ],
)
def test_rank_0_logs_the_reason_for_the_choice_of_auto(
    place: Place, more: Given, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "zcomm"):
        chosen({}, place, **{"model": nn.Linear(2, 2), **more})
    (told,) = (record.getMessage() for record in caplog.records)
    assert re.match(f"updates run in {words}", told), told


def test_a_choice_that_needs_no_reason_logs_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zcomm"):
        assert chosen({"gradients": "nvme"}, DRIVE, nn.Linear(2, 2)) == "forward"
        assert chosen({"update": "step"}, DRIVE, nn.Linear(2, 2)) == "step"
    assert not caplog.records


# --- built -----------------------------------------------------------------------------------------------------------

# offload, share_parameters, and the policy of "auto" for stages 0 to 3 of a model on the CPU
ON_THE_CPU: list[tuple[Any, bool, list[str]]] = [
    (None, True, ["step", "step", "step", "step"]),
    (None, False, ["step", "step", "step", "step"]),
    ("cpu", True, ["step", "step", "step", "step"]),
    ("cpu", False, ["step", "step", "step", "step"]),
    ("nvme", True, ["step", "step", "step", "forward"]),
    ("nvme", False, ["step", "step", "step", "forward"]),
    (Offload("nvme"), True, ["step", "step", "step", "step"]),
    (Offload("nvme"), False, ["step", "step", "step", "forward"]),
    (Offload("nvme", gradients="nvme"), False, ["step", "step", "step", "forward"]),
]
# the same for a model on a device
ON_A_DEVICE: list[tuple[Any, list[str]]] = [
    (None, ["step", "step", "step", "step"]),
    ("cpu", ["step", "step", "step", "step"]),
    ("nvme", ["step", "step", "step", "forward"]),
    (Offload("nvme"), ["step", "step", "step", "step"]),
    (Offload("cpu", gradients="nvme"), ["step", "step", "step", "step"]),
]
# only in stage 3, which has weights to offload
WITH_WEIGHTS: list[tuple[Offload, str]] = [
    (Offload(params="nvme"), "forward"),
    (Offload("cpu", "nvme"), "forward"),
    (Offload("nvme", "nvme", gradients="nvme"), "forward"),
    (Offload("nvme", "nvme", gradients="nvme", atomic=True), "forward"),
    (Offload("nvme", "nvme", atomic=True), "forward"),
    (Offload("nvme", "nvme", update="step"), "step"),
    (Offload("cpu", lambda name, param: "nvme" if name == "0.weight" else "cpu"), "forward"),
]


def built(folder: Path, stage: int, offload: Any, share_parameters: bool = True) -> str:
    """Return the policy of an optimizer that is built."""
    opt = zcomm.ZeroOptimizer(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
        "adamw",
        stage=stage,
        offload=offload,
        nvme_path=folder,
        share_parameters=share_parameters,
    )
    try:
        return NAMES[type(opt._open_parts.updates)]  # type: ignore[index]
    finally:
        opt.close()


def test_the_default_in_each_stage_and_place_on_the_cpu(tmp_path: Path) -> None:
    for offload, share, policies in ON_THE_CPU:
        assert [built(tmp_path, stage, offload, share) for stage in range(4)] == policies, (offload, share)
    for where, policy in WITH_WEIGHTS:
        assert built(tmp_path, 3, where) == policy, where


def test_the_default_in_each_stage_and_place_on_a_device(tmp_path: Path) -> None:
    simulated.play()
    try:
        for offload, policies in ON_A_DEVICE:
            assert [built(tmp_path, stage, offload) for stage in range(4)] == policies, offload
        for where, policy in WITH_WEIGHTS[1:]:  # the first one leaves state on the device
            assert built(tmp_path, 3, where) == policy, where
        assert built(tmp_path, 3, WITH_WEIGHTS[0][0]) == "step"
    finally:
        simulated.stop()
        zcomm.shutdown()
