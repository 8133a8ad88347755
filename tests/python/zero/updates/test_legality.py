"""The policy of updates that a program gets, by options and by the place of its weights: no optimizer is built."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import zcomm
from zcomm.zero.schedule.legality import Place, choose_policy

UNITS, WHOLE, RAM = Place(True, False), Place(False, True), Place(False, False)
Given = dict[str, Any]


def chosen(given: Given, place: Place, model: nn.Module | None, needs: str = "", **rule: Any) -> str:
    kind = SimpleNamespace(**{"name": "adamw", "sums": 0, "whole_matrices": (), **rule})
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
        ({"update": "auto"}, UNITS, "forward"),
        ({"update": "auto", "gradients": "nvme"}, UNITS, "backward"),
        ({"update": "auto"}, WHOLE, "step"),
        ({"update": "auto"}, RAM, "step"),
    ],
)
def test_a_policy_follows_option_and_place(given: Given, place: Place, policy: str) -> None:
    assert chosen(given, place, nn.Linear(2, 2)) == policy


@pytest.mark.parametrize(
    ("given", "place", "error", "words"),
    [
        ({"update": "forward"}, RAM, ValueError, "update='forward' needs stage=3 by units .* or the model itself on a"),
        ({"step_behind_forward": True}, RAM, ValueError, "step_behind_forward=True needs stage=3 by units"),
        ({"update": "backward", "gradients": "nvme"}, WHOLE, ValueError, "update='backward' needs stage=3 by units"),
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
    assert chosen({"update": "auto", **sums}, UNITS, model, "clip_norm=1.0") == "forward"
    with pytest.raises(ValueError, match=r"clip_norm=1\.0, which needs all gradients"):
        chosen({"update": "backward", **sums}, UNITS, model, "clip_norm=1.0")
    for rule in ({"sums": 2}, {"whole_matrices": (0,)}):
        assert chosen({"update": "auto"}, UNITS, model, **rule) == "step"
        with pytest.raises(NotImplementedError, match="needs whole parameters or matrices"):
            chosen({"update": "forward"}, UNITS, model, **rule)
    assert chosen({"update": "forward"}, WHOLE, model, sums=2) == "behind", "its thread measures nothing"
    with pytest.raises(NotImplementedError, match="is not available"):
        chosen({"update": "forward"}, WHOLE, model, whole_matrices=(0,))
    with pytest.raises(ValueError, match="needs the model itself: its modules wait"):
        chosen({"update": "forward"}, WHOLE, None)


def test_auto_tells_why_updates_run_in_step(caplog: pytest.LogCaptureFixture) -> None:
    clipped = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0))
    with caplog.at_level(logging.INFO, "zcomm"):
        assert chosen({"update": "auto"}, UNITS, clipped) == "step"
        assert chosen({"update": "auto"}, WHOLE, clipped) == "step"
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all(text.startswith("updates run in step(): ") for text in told)
    assert "0 has max_norm" in told[0] and "keeps in a list" in told[1]
