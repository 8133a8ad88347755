"""Schedules of a training forward's arguments: values by formula, and that the engine passes and resumes them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from test_engine import make
from zcomm.engine.curriculum import CurriculumScheduler, ForwardArguments, ProgressiveLayerDrop

LINEAR = {"total_curriculum_step": 8, "difficulty_step": 2}


def curriculum(kind: str, low: int = 2, high: int = 10, **schedule: Any) -> dict[str, Any]:
    return {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": schedule}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (curriculum("fixed_linear", **LINEAR), [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]),
        (curriculum("fixed_root", root_degree=2, **LINEAR), [4, 6, 6, 6, 8, 8, 8, 10, 10, 10]),
        (curriculum("fixed_root", root_degree=1, **LINEAR), [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]),
        (curriculum("fixed_linear", 3, 10, **LINEAR), [3, 4, 4, 6, 6, 8, 8, 10, 10, 10]),  # never below the first one
        (curriculum("fixed_discrete", difficulty=[1, 2, 5], max_step=[2, 4]), [1, 1, 2, 2, 5, 5]),
    ],
)
def test_difficulty_by_step(config: dict[str, Any], expected: list[int]) -> None:
    scheduler = CurriculumScheduler(config)
    assert scheduler.get_current_difficulty() == config["min_difficulty"]
    assert [scheduler.update_difficulty(step) for step in range(1, len(expected) + 1)] == expected
    assert scheduler.get_current_difficulty() == expected[-1]
    other = CurriculumScheduler(config)
    other.set_state(scheduler.get_state())
    assert other.get_current_difficulty() == expected[-1]


def test_a_custom_schedule() -> None:
    scheduler = CurriculumScheduler(curriculum("custom"))
    with pytest.raises(RuntimeError, match="set_custom_get_difficulty"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: 3 * step)
    assert scheduler.update_difficulty(4) == 12
    scheduler.set_current_difficulty(5)
    assert scheduler.get_current_difficulty() == 5


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"min_difficulty": 1}, '"curriculum_learning.max_difficulty" is missing'),
        (curriculum("other"), "schedule_type\": 'other'"),
        (curriculum("fixed_linear"), 'schedule_config.total_curriculum_step" is missing for fixed_linear'),
        (curriculum("fixed_discrete", difficulty=[1], max_step=[2]), "1 difficulties need one max_step less, not 1"),
        (curriculum("custom", low=9, high=3), '"curriculum_learning.min_difficulty": 9 is above max_difficulty: 3'),
    ],
)
def test_wrong_schedules_are_named(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        CurriculumScheduler(config)


@pytest.mark.parametrize("theta", [0.0, 0.1, 1.0])
def test_layer_drop_by_step(theta: float) -> None:
    schedule = ProgressiveLayerDrop(theta, 0.01)
    assert schedule.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step in range(5):
        schedule.update_state(step)
        assert schedule.get_theta() == (1 - theta) * math.exp(-0.01 * step) + theta


class Listens(nn.Module):
    """A model that notes the arguments of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.heard: list[dict[str, Any]] = []

    def forward(self, x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.heard.append(arguments)
        return (self.weight * x).sum()


def test_the_engine_passes_them_in_training_and_after_a_resume() -> None:
    engine = make(
        curriculum_learning={"enabled": True, **curriculum("fixed_linear", **LINEAR)},
        progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.1},
    )
    engine.module = model = Listens()
    for _ in range(3):
        engine.backward(engine(torch.ones(2)))
        engine.step()
    theta = [0.5 * math.exp(-0.1 * step) + 0.5 for step in (0, 0, 1, 2)]
    assert [each["curriculum_seqlen"] for each in model.heard] == [2, 4, 4]
    assert [each["pld_theta"] for each in model.heard] == theta[:3]
    assert all(each["progressive_layer_drop"] is True for each in model.heard)
    assert engine.get_pld_theta() == theta[3]
    assert engine.curriculum_scheduler_legacy is not None and engine.progressive_layer_drop is not None
    engine.eval()
    engine(torch.ones(2))
    assert model.heard[-1] == {}
    engine.train()
    engine.global_steps = 7  # as load_checkpoint sets it
    engine(torch.ones(2))
    assert model.heard[-1]["curriculum_seqlen"] == 10


def test_without_the_sections_the_forward_gets_nothing() -> None:
    engine = make()
    engine.module = model = Listens()
    engine(torch.ones(2))
    assert model.heard == [{}] and engine.get_pld_theta() is None
    assert engine.curriculum_scheduler_legacy is None and engine.progressive_layer_drop is None


def test_another_curriculum_type_is_read_from_the_scheduler() -> None:
    from zcomm.config import load

    config = {"enabled": True, "curriculum_type": "words", **curriculum("fixed_linear", **LINEAR)}
    arguments = ForwardArguments(load({"train_batch_size": 1, "curriculum_learning": config}))
    assert arguments.at(3) == {}
    assert arguments.curriculum is not None and arguments.curriculum.get_current_difficulty() == 6
