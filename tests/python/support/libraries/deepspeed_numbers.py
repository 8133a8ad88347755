"""Run by DeepSpeed's own Python: its loss scales and learning rates for cases given as JSON on standard input."""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed.runtime.lr_schedules as schedules
import torch
from deepspeed.runtime.fp16 import loss_scaler


class NoRanks:
    @staticmethod
    def get_rank() -> int:
        return 1


def scales(rule: dict[str, Any], overflows: list[bool]) -> list[float]:
    scaler = loss_scaler.DynamicLossScaler(raise_error_at_min_scale=False, **rule)
    found = []
    for overflow in overflows:
        scaler.update_scale(overflow)
        found.append(float(scaler.cur_scale))
    return found


def rates(name: str, options: dict[str, Any], calls: list[list[int]]) -> list[list[float]]:
    groups = [{"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.02)]
    optimizer = torch.optim.Adam(groups)
    schedule = getattr(schedules, name)(optimizer, **options)
    found = []
    for call in calls:  # arguments of step()
        optimizer.step()
        schedule.step(*call)
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


def main() -> None:
    loss_scaler.dist = NoRanks
    loss_scaler.log_dist = lambda *args, **more: None
    cases = json.load(sys.stdin)
    result = {
        "scales": [scales(*case) for case in cases["scales"]],
        "rates": [rates(*case) for case in cases["rates"]],
    }
    print("NUMBERS " + json.dumps(result))


if __name__ == "__main__":
    main()
