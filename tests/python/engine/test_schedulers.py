"""The schedules against numbers computed by hand from DeepSpeed's formulas, and against DeepSpeed's own results."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch

from zcomm.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(opt: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """Return the rate of each of ``steps`` optimizer steps, and of the step after them."""
    seen = [opt.param_groups[0]["lr"]]
    for _ in range(steps):
        opt.step()
        schedule.step()
        seen.append(opt.param_groups[0]["lr"])
    return seen


def test_linear() -> None:
    opt = optimizer(1.0)
    schedule = WarmupLR(opt, 0.1, 0.5, warmup_num_steps=4, warmup_type="linear")
    # iterations: before the first step, 0, 1, 2, 3, 4, 5
    assert rates_of(opt, schedule, 6) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rel=1e-12)


def test_log() -> None:
    opt = optimizer(1.0)
    schedule = WarmupLR(opt, 0.0, 0.001, warmup_num_steps=8, warmup_type="log")
    # log(i + 1) / log(8): 0, 1/3, log 3 / log 8, 2/3, ...
    third = math.log(3) / math.log(8)
    wanted = [0.0, 0.0, 0.001 / 3, 0.001 * third, 0.002 / 3]
    assert rates_of(opt, schedule, 4) == pytest.approx(wanted, rel=1e-12, abs=1e-18)
    assert third == pytest.approx(0.5283208335737187, rel=1e-15)
    assert rates_of(opt, schedule, 20)[-1] == 0.001


def test_log_reaches_the_maximum_at_the_last_warmup_iteration_and_linear_one_later() -> None:
    for kind, at_last in (("log", 1.0), ("linear", 0.9)):
        opt = optimizer(1.0)
        seen = rates_of(opt, WarmupLR(opt, 0.0, 1.0, 10, kind), 12)
        assert seen[10] == pytest.approx(at_last, rel=1e-12)  # iteration 9
        assert seen[11] == 1.0


def test_defaults_are_zero_to_each_groups_rate_in_1000_log_steps() -> None:
    opt = optimizer(0.25, 7.0)
    schedule = WarmupLR(opt)
    assert [group["lr"] for group in opt.param_groups] == [0.0, 0.0]
    rates_of(opt, schedule, 101)
    part = math.log(101) / math.log(1000)
    assert [group["lr"] for group in opt.param_groups] == pytest.approx([0.25 * part, 7.0 * part], rel=1e-12)


def test_one_warmup_step_counts_as_two() -> None:
    opt = optimizer(1.0)
    assert rates_of(opt, WarmupLR(opt, 0.0, 1.0, 1, "linear"), 3) == [0.0, 0.0, 0.5, 1.0]


def test_one_rate_per_group() -> None:
    opt = optimizer(1.0, 1.0)
    schedule = WarmupLR(opt, [0.0, 0.1], (0.2, 0.3), 2, "linear")
    rates_of(opt, schedule, 2)
    assert schedule.get_last_lr() == pytest.approx([0.1, 0.2])


def test_it_is_a_torch_schedule_and_resumes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = rates_of(first := optimizer(1.0), WarmupLR(first, 0.0, 1.0, 10), 8)
        opt = optimizer(1.0)
        schedule = WarmupLR(opt, 0.0, 1.0, 10)
        rates_of(opt, schedule, 3)
        resumed = WarmupLR(opt, 0.0, 1.0, 10)
        resumed.load_state_dict(schedule.state_dict())
        assert isinstance(resumed, torch.optim.lr_scheduler.LRScheduler)
        opt.param_groups[0]["lr"] = resumed.get_last_lr()[0]
        assert rates_of(opt, resumed, 5) == whole[3:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup_type": "cubic"}, 'must be "log" or "linear", got \'cubic\''),
        ({"warmup_num_steps": -1}, "whole number >= 0, got -1"),
        ({"warmup_num_steps": 2.5}, "whole number >= 0, got 2.5"),
        ({"warmup_min_lr": [0.0, 0.1]}, "warmup_min_lr has 2 values for 1 parameter groups"),
        ({"warmup_max_lr": []}, "warmup_max_lr has 0 values for 1 parameter groups"),
    ],
)
def test_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        WarmupLR(optimizer(1.0), **arguments)
    assert message in str(caught.value)


def test_warmup_decay_falls_to_zero() -> None:
    opt = optimizer(1.0)
    schedule = WarmupDecayLR(opt, 8, 0.0, 0.4, warmup_num_steps=4, warmup_type="linear")
    # iterations -, 0, 1, 2, 3, 4 (the top), 5, 6, 7, 8 (zero), 9
    wanted = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0]
    assert rates_of(opt, schedule, 10) == pytest.approx(wanted, rel=1e-12, abs=1e-15)


def test_warmup_cosine_is_a_ratio_of_each_groups_rate() -> None:
    opt = optimizer(2.0, 4.0)
    schedule = WarmupCosineLR(opt, 6, 0.5, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear")
    # iterations -, 0, 1: 0.5 + 0.5 * i / 2; then 0.1 + 0.9 * (1 + cos(pi * (i - 1) / 4)) / 2
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    wanted = [0.0, 0.5, 0.75, *cosine]
    assert rates_of(opt, schedule, 6) == pytest.approx([2 * ratio for ratio in wanted], rel=1e-12)
    assert opt.param_groups[1]["lr"] == pytest.approx(0.4)


def test_range_test_grows_in_a_line_or_in_stairs() -> None:
    for staircase, wanted in ((False, [0.1, 0.15, 0.2, 0.25, 0.3]), (True, [0.1, 0.1, 0.2, 0.2, 0.3])):
        opt = optimizer(1.0)
        schedule = LRRangeTest(opt, 0.1, 2, 1.0, staircase)
        assert rates_of(opt, schedule, 4) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", ["cycle_min_mom", "cycle_max_mom"])
def test_a_momentum_of_one_cycle_outside_of_its_range(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=1.0: Adam's first beta must lie in \[0, 1\)"):
        OneCycle(torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))]), 0.1, 0.5, **{name: 1.0})


@pytest.mark.parametrize("rate", [0.3, -0.25])
def test_one_cycle_warns_of_a_momentum_that_leaves_its_range(rate: float) -> None:
    opt = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    sizes: dict[str, Any] = {"cycle_first_step_size": 2, "decay_step_size": 4, "decay_mom_rate": rate}
    with pytest.warns(UserWarning, match=r"takes Adam's first beta out of \[0, 1\) after \d+ calls") as caught:
        schedule = OneCycle(opt, 0.01, 0.1, **sizes)
    steps = int(re.findall(r"after (\d+) calls", str(caught[0].message))[0])
    betas = []
    for _ in range(steps):
        opt.step()
        schedule.step()
        betas.append(opt.param_groups[0]["betas"][0])
    assert [0 <= beta < 1 for beta in betas] == [True] * (steps - 1) + [False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OneCycle(opt, 0.01, 0.1, **sizes, cycle_momentum=False)
        OneCycle(optimizer(0.1), 0.01, 0.1, **sizes)
        OneCycle(opt, 0.01, 0.1, **{**sizes, "decay_step_size": 0})


def test_one_cycle_and_its_decay() -> None:
    opt = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    schedule = OneCycle(
        opt, 0.1, 0.5, decay_lr_rate=1.0, cycle_first_step_size=2, cycle_second_step_size=4, decay_step_size=2
    )
    betas = [opt.param_groups[0]["betas"][0]]
    seen = [opt.param_groups[0]["lr"]]
    for _ in range(8):
        opt.step()
        schedule.step()
        seen.append(opt.param_groups[0]["lr"])
        betas.append(opt.param_groups[0]["betas"][0])
    assert seen == pytest.approx([0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1 / 1.5, 0.05], rel=1e-9)
    assert betas == pytest.approx([0.8, 0.85, 0.8, 0.825, 0.85, 0.875, 0.9, 0.9, 0.9], rel=1e-9)
    assert opt.param_groups[0]["betas"][1] == 0.99
    sgd = optimizer(1.0)
    OneCycle(sgd, 0.1, 0.5)
    assert "betas" not in sgd.param_groups[0]


@pytest.mark.parametrize("kind", [WarmupDecayLR, WarmupCosineLR])
def test_totals_are_counts(kind: Any) -> None:
    with pytest.raises(ValueError, match="total_num_steps must be a whole number >= 1, got 0"):
        kind(optimizer(1.0), 0)


def test_cosine_stays_at_its_end() -> None:
    opt = optimizer(1.0)
    seen = rates_of(opt, WarmupCosineLR(opt, 4, warmup_num_steps=2, cos_min_ratio=0.25), 12)
    assert seen[-8:] == [0.25] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cycle_first_step_size": 0}, "cycle_first_step_size must be a whole number >= 1, got 0"),
        ({"cycle_second_step_size": -1}, "cycle_second_step_size must be a whole number >= 0, got -1"),
        ({"cycle_first_stair_count": 1.5}, "cycle_first_stair_count must be a whole number >= 0, got 1.5"),
        ({"cycle_min_mom": [0.1, 0.2]}, "cycle_min_mom has 2 values for 1 parameter groups"),
    ],
)
def test_errors_of_one_cycle(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        OneCycle(optimizer(1.0), 0.1, 0.5, **arguments)
    assert message in str(caught.value)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (WarmupLR, {"warmup_num_steps": 5}),
    (WarmupDecayLR, {"total_num_steps": 9, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}),
    (WarmupCosineLR, {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_min_ratio": 0.1}),
    (LRRangeTest, {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    (OneCycle, {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4, "decay_step_size": 2}),
]


def adam() -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.3, 0.07)])


def values(opt: torch.optim.Optimizer) -> list[tuple[float, tuple[float, float]]]:
    return [(group["lr"], group["betas"]) for group in opt.param_groups]


def walked(kind: Any, options: dict[str, Any], steps: int) -> tuple[Any, Any]:
    opt = adam()
    schedule = kind(opt, **options)
    for _ in range(steps):
        opt.step()
        schedule.step()
    return opt, schedule


def test_step_takes_deepspeeds_iterations() -> None:
    opt = optimizer(0.3)
    schedule = WarmupLR(opt)
    opt.step()
    schedule.step(1)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.030102999566398118, rel=1e-12)
    assert schedule.last_batch_iteration == 1


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_a_jump_is_as_many_steps(kind: Any, options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt, schedule = walked(kind, options, 2)
        for iteration in (0, 3, 11, 1, 5, 4):
            schedule.step(iteration)
            there, other = walked(kind, options, iteration + 1)
            assert values(opt) == values(there) and schedule.get_last_lr() == other.get_last_lr()
            assert schedule.last_batch_iteration == other.last_batch_iteration == iteration
            schedule.step()
            other.step()
            assert values(opt) == values(there), "and on from there"


@pytest.mark.parametrize("form", ["ours", "deepspeeds", "before"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_states_of_both_forms(kind: Any, options: dict[str, Any], form: str) -> None:
    there, other = walked(kind, options, 6)
    state = other.state_dict()
    assert state["last_batch_iteration"] == 5, "as DeepSpeed's"
    if form == "deepspeeds":
        state = {"last_batch_iteration": 5}
    elif form == "before":  # from a checkpoint of an earlier version
        del state["last_batch_iteration"]
    opt, schedule = walked(kind, options, 1)
    schedule.load_state_dict(state)
    for each in (schedule, other):
        each.step()
    assert values(opt) == values(there)
    resumed = adam()
    later = kind(resumed, **options, last_batch_iteration=5)
    later.step()
    assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in there.param_groups]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=[kind.__name__ for kind, _ in KINDS])
def test_a_run_goes_on_with_other_arguments(kind: Any, options: dict[str, Any]) -> None:
    """The state is only a position, as in DeepSpeed: the rates follow the arguments of the new schedule."""
    longer = {**options, **{key: 3 * value for key, value in options.items() if key.endswith(("_steps", "_step_size"))}}
    assert longer != options
    there, other = walked(kind, longer, 9)
    opt, schedule = walked(kind, longer, 1)
    _, shorter = walked(kind, options, 6)
    schedule.load_state_dict(shorter.state_dict())
    for _ in range(3):
        schedule.step()
    assert values(opt) == values(there) and schedule.last_epoch == other.last_epoch


def test_places_that_are_none() -> None:
    schedule = WarmupLR(optimizer(1.0))
    for place in (-2, True, "3", float("nan")):
        with pytest.raises(ValueError, match=r"WarmupLR.step\(.*\) needs an iteration"):
            schedule.step(place)
    with pytest.raises(ValueError, match="neither last_epoch nor last_batch_iteration"):
        schedule.load_state_dict({"num_steps": 3})
    with pytest.raises(ValueError, match="say the same"):
        WarmupLR(optimizer(1.0), last_epoch=3, last_batch_iteration=4)
