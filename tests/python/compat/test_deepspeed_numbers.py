"""Loss scales and learning rates equal DeepSpeed's, to the bit or the last places.

Needs ZCOMM_TEST_DEEPSPEED=PYTHON, a Python with DeepSpeed. (test_schedulers.py has recorded numbers.)
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from typing import Any

import pytest
import torch

from places import LIBRARIES
from zcomm import schedulers
from zcomm.zero.loss_scale import LossScale, LossScaler

PYTHON = os.environ.get("ZCOMM_TEST_DEEPSPEED")
STEPS = 60
CALLS: list[list[int]] = [*([] for _ in range(STEPS)), [0], [], [5], [], [3], [29], [], [0], [60], [12], [25], []]
RULES = [
    LossScale(power, window, hysteresis, minimum, consecutive)
    for power, window, hysteresis, minimum in ((16, 1, 1, 1.0), (4, 3, 2, 4.0), (8, 2, 3, 0.25), (2, 7, 2, 1.0))
    for consecutive in (False, True)
]
RATES: list[tuple[str, dict[str, Any]]] = [
    ("WarmupLR", {"warmup_min_lr": 0.001, "warmup_max_lr": 0.05, "warmup_num_steps": 7}),
    ("WarmupLR", {"warmup_max_lr": 0.05, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("WarmupLR", {"warmup_num_steps": 5}),
    ("WarmupDecayLR", {"total_num_steps": 40, "warmup_max_lr": 0.05, "warmup_num_steps": 7}),
    ("WarmupDecayLR", {"total_num_steps": 30, "warmup_max_lr": 0.05, "warmup_num_steps": 9, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 7, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05}),
    ("WarmupCosineLR", {"total_num_steps": 40, "warmup_num_steps": 7, "warmup_type": "linear"}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 6, "lr_range_test_step_rate": 2.0}),
    ("LRRangeTest", {"lr_range_test_step_size": 6, "lr_range_test_staircase": True}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 10}),
    (
        "OneCycle",
        {
            "cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 10, "cycle_second_step_size": 15,
            "decay_step_size": 5, "decay_lr_rate": 0.5, "cycle_first_stair_count": 3, "cycle_second_stair_count": 4,
        },
    ),
]  # fmt: skip


def overflows() -> list[list[bool]]:
    draw = random.Random(3)
    return [[draw.random() < share for _ in range(STEPS)] for share in (0.0, 0.1, 0.3, 0.5, 0.9)]


@pytest.fixture(scope="module")
def deepspeed() -> Any:
    if PYTHON is None:
        pytest.skip("ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has DeepSpeed")
    named = [
        {
            "init_scale": 2.0**rule.initial_power,
            "scale_window": rule.window,
            "min_scale": rule.minimum,
            "delayed_shift": rule.hysteresis,
            "consecutive_hysteresis": rule.consecutive,
        }
        for rule in RULES
    ]
    cases = {
        "scales": [(rule, bad) for rule in named for bad in overflows()],
        "rates": [(*case, CALLS) for case in RATES],
    }
    script = LIBRARIES / "deepspeed_numbers.py"
    done = subprocess.run([PYTHON, script], input=json.dumps(cases), capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("NUMBERS ")]
    return json.loads(line.removeprefix("NUMBERS "))


def test_loss_scales(deepspeed: Any) -> None:
    number = 0
    for rule in RULES:
        for bad in overflows():
            scaler, found = LossScaler(rule), []
            for overflow in bad:
                scaler.update(overflow)
                found.append(scaler.scale)
            assert found == deepspeed["scales"][number], f"{rule}, {bad}"
            number += 1
    assert number == len(deepspeed["scales"]) == 40


@pytest.mark.parametrize("number", range(len(RATES)))
def test_rates(deepspeed: Any, number: int) -> None:
    name, options = RATES[number]
    optimizer = torch.optim.Adam([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.02)])
    schedule = getattr(schedulers, name)(optimizer, **options)
    found = []
    for call in CALLS:
        optimizer.step()
        schedule.step(*call)
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    for step, (ours, theirs) in enumerate(zip(found, deepspeed["rates"][number], strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15), f"{name} {options}, step {step}"
