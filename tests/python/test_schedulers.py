"""The schedules against numbers worked out by hand from DeepSpeed's formulas, and against what DeepSpeed gave."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

import zcomm.schedulers
from zcomm.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def optimizer(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates_of(opt: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    """The rate that each of ``steps`` optimizer steps runs at, and the one after them."""
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
        ({"warmup_num_steps": 0}, "whole number >= 1, got 0"),
        ({"warmup_num_steps": 2.5}, "whole number >= 1, got 2.5"),
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


# Two groups of Adam with lr 0.3 and 0.07: rates of both groups and the first beta before each of 14 steps, as DeepSpeed
# 0.19.8 gave them (torch 2.x, float64).
DEEPSPEED: list[tuple[str, dict[str, Any], list[float], list[float], list[float] | None]] = [
    (
        "WarmupLR",
        {"warmup_min_lr": 0.01, "warmup_num_steps": 5},
        [
            0.01,
            0.01,
            0.13489620184128398,
            0.20795579640093576,
            0.25979240368256795,
            0.3,
            0.3,
            0.3,
            0.3,
            0.3,
            0.3,
            0.3,
            0.3,
            0.3,
        ],
        [
            0.01,
            0.01,
            0.035840593484403584,
            0.050956371669159124,
            0.06168118696880717,
            0.07,
            0.07,
            0.07,
            0.07,
            0.07,
            0.07,
            0.07,
            0.07,
            0.07,
        ],
        None,
    ),
    (
        "WarmupLR",
        {"warmup_max_lr": [0.1, 0.9], "warmup_num_steps": 4, "warmup_type": "linear"},
        [0.0, 0.0, 0.025, 0.05, 0.07500000000000001, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        [0.0, 0.0, 0.225, 0.45, 0.675, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9],
        None,
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 9, "warmup_num_steps": 3},
        [
            0.0,
            0.0,
            0.0006309297535714573,
            0.001,
            0.001,
            0.0008333333333333334,
            0.0006666666666666666,
            0.0005,
            0.0003333333333333333,
            0.00016666666666666666,
            0.0,
            0.0,
            0.0,
            0.0,
        ],
        [
            0.0,
            0.0,
            0.0006309297535714573,
            0.001,
            0.001,
            0.0008333333333333334,
            0.0006666666666666666,
            0.0005,
            0.0003333333333333333,
            0.00016666666666666666,
            0.0,
            0.0,
            0.0,
            0.0,
        ],
        None,
    ),
    (
        "WarmupDecayLR",
        {
            "total_num_steps": 9,
            "warmup_min_lr": 0.01,
            "warmup_max_lr": 0.5,
            "warmup_num_steps": 4,
            "warmup_type": "linear",
        },
        [0.01, 0.01, 0.1325, 0.255, 0.3775, 0.5, 0.402, 0.304, 0.20600000000000002, 0.108, 0.01, 0.01, 0.01, 0.01],
        [0.01, 0.01, 0.1325, 0.255, 0.3775, 0.5, 0.402, 0.304, 0.20600000000000002, 0.108, 0.01, 0.01, 0.01, 0.01],
        None,
    ),
    (
        "WarmupCosineLR",
        {"total_num_steps": 8, "warmup_num_steps": 3},
        [
            0.0,
            0.0,
            0.18927892607143718,
            0.3,
            0.2713554139013265,
            0.19636291390132649,
            0.10366708609867352,
            0.028674586098673523,
            3e-05,
            3e-05,
            3e-05,
            3e-05,
            3e-05,
            3e-05,
        ],
        [
            0.0,
            0.0,
            0.04416508275000201,
            0.07,
            0.06331626324364285,
            0.045818013243642854,
            0.02418898675635716,
            0.006690736756357156,
            7.000000000000001e-06,
            7.000000000000001e-06,
            7.000000000000001e-06,
            7.000000000000001e-06,
            7.000000000000001e-06,
            7.000000000000001e-06,
        ],
        None,
    ),
    (
        "WarmupCosineLR",
        {
            "total_num_steps": 4,
            "warmup_min_ratio": 0.1,
            "warmup_num_steps": 2,
            "cos_min_ratio": 0.2,
            "warmup_type": "linear",
        },
        [0.0, 0.03, 0.165, 0.18000000000000002, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06, 0.06],
        [
            0.0,
            0.007000000000000001,
            0.038500000000000006,
            0.04200000000000001,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
            0.014000000000000002,
        ],
        None,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_step_size": 3},
        [
            0.001,
            0.0013333333333333333,
            0.0016666666666666666,
            0.002,
            0.002333333333333333,
            0.002666666666666667,
            0.003,
            0.0033333333333333335,
            0.0036666666666666666,
            0.004,
            0.004333333333333334,
            0.004666666666666666,
            0.005,
            0.005333333333333333,
        ],
        [
            0.001,
            0.0013333333333333333,
            0.0016666666666666666,
            0.002,
            0.002333333333333333,
            0.002666666666666667,
            0.003,
            0.0033333333333333335,
            0.0036666666666666666,
            0.004,
            0.004333333333333334,
            0.004666666666666666,
            0.005,
            0.005333333333333333,
        ],
        None,
    ),
    (
        "LRRangeTest",
        {
            "lr_range_test_min_lr": [0.1, 0.2],
            "lr_range_test_step_size": 4,
            "lr_range_test_step_rate": 2.5,
            "lr_range_test_staircase": True,
        },
        [
            0.1,
            0.1,
            0.1,
            0.1,
            0.35000000000000003,
            0.35000000000000003,
            0.35000000000000003,
            0.35000000000000003,
            0.6000000000000001,
            0.6000000000000001,
            0.6000000000000001,
            0.6000000000000001,
            0.8500000000000001,
            0.8500000000000001,
        ],
        [
            0.2,
            0.2,
            0.2,
            0.2,
            0.7000000000000001,
            0.7000000000000001,
            0.7000000000000001,
            0.7000000000000001,
            1.2000000000000002,
            1.2000000000000002,
            1.2000000000000002,
            1.2000000000000002,
            1.7000000000000002,
            1.7000000000000002,
        ],
        None,
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.01,
            "cycle_max_lr": 0.3,
            "decay_lr_rate": 0.5,
            "cycle_first_step_size": 3,
            "cycle_second_step_size": 5,
            "decay_step_size": 3,
            "decay_mom_rate": 0.1,
        },
        [
            0.01,
            0.10666666666666665,
            0.2033333333333333,
            0.3,
            0.242,
            0.184,
            0.126,
            0.06799999999999999,
            0.01,
            0.008571428571428572,
            0.007500000000000001,
            0.006666666666666667,
            0.006000000000000001,
            0.005454545454545454,
        ],
        [
            0.01,
            0.10666666666666665,
            0.2033333333333333,
            0.3,
            0.242,
            0.184,
            0.126,
            0.06799999999999999,
            0.01,
            0.008571428571428572,
            0.007500000000000001,
            0.006666666666666667,
            0.006000000000000001,
            0.005454545454545454,
        ],
        [
            0.8,
            0.8666666666666667,
            0.8333333333333334,
            0.8,
            0.8200000000000001,
            0.8400000000000001,
            0.86,
            0.88,
            0.9,
            0.9300000000000002,
            0.96,
            0.9900000000000001,
            1.02,
            1.05,
        ],
    ),
    (
        "OneCycle",
        {
            "cycle_min_lr": [0.01, 0.02],
            "cycle_max_lr": 0.3,
            "cycle_first_step_size": 6,
            "cycle_first_stair_count": 2,
            "cycle_second_stair_count": 3,
            "cycle_min_mom": 0.7,
        },
        [
            0.01,
            0.01,
            0.01,
            0.155,
            0.155,
            0.155,
            0.3,
            0.2033333333333333,
            0.2033333333333333,
            0.10666666666666665,
            0.10666666666666665,
            0.01,
            0.01,
            0.01,
        ],
        [
            0.02,
            0.02,
            0.02,
            0.15999999999999998,
            0.15999999999999998,
            0.15999999999999998,
            0.3,
            0.20666666666666664,
            0.20666666666666664,
            0.11333333333333333,
            0.11333333333333333,
            0.02,
            0.02,
            0.02,
        ],
        [
            0.7,
            0.9,
            0.9,
            0.8,
            0.8,
            0.8,
            0.7,
            0.7666666666666666,
            0.7666666666666666,
            0.8333333333333334,
            0.8333333333333334,
            0.9,
            0.9,
            0.9,
        ],
    ),
]


@pytest.mark.parametrize(("name", "options", "first", "second", "betas"), DEEPSPEED)
def test_deepspeeds_numbers(
    name: str, options: dict[str, Any], first: list[float], second: list[float], betas: list[float] | None
) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in (0.3, 0.07)]
    opt = torch.optim.Adam(groups)
    schedule = getattr(zcomm.schedulers, name)(opt, **options)
    seen: list[tuple[float, float, float]] = []
    for _ in range(len(first)):
        seen.append((opt.param_groups[0]["lr"], opt.param_groups[1]["lr"], opt.param_groups[0]["betas"][0]))
        opt.step()
        schedule.step()
    rates, others, momenta = (list(values) for values in zip(*seen, strict=True))
    assert rates == pytest.approx(first, rel=1e-15)
    assert others == pytest.approx(second, rel=1e-15)
    assert betas is None or momenta == pytest.approx(betas, rel=1e-15)
