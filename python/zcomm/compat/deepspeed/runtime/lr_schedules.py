"""``deepspeed.runtime.lr_schedules``: zcomm.schedulers' classes, and the words and arguments around them.

Source: DeepSpeed's arguments and their defaults.
"""

from __future__ import annotations

import argparse
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch

from zcomm.schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

LR_SCHEDULE = "lr_schedule"
LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]

LR_RANGE_TEST_MIN_LR = "lr_range_test_min_lr"
LR_RANGE_TEST_STEP_RATE = "lr_range_test_step_rate"
LR_RANGE_TEST_STEP_SIZE = "lr_range_test_step_size"
LR_RANGE_TEST_STAIRCASE = "lr_range_test_staircase"

EDGE_VALUE = "edge_value"
MID_VALUE = "mid_value"
CYCLE_FIRST_STEP_SIZE = "cycle_first_step_size"
CYCLE_FIRST_STAIR_COUNT = "cycle_first_stair_count"
CYCLE_SECOND_STEP_SIZE = "cycle_second_step_size"
CYCLE_SECOND_STAIR_COUNT = "cycle_second_stair_count"
DECAY_STEP_SIZE = "decay_step_size"
CYCLE_MIN_LR = "cycle_min_lr"
CYCLE_MAX_LR = "cycle_max_lr"
DECAY_LR_RATE = "decay_lr_rate"
CYCLE_MIN_MOM = "cycle_min_mom"
CYCLE_MAX_MOM = "cycle_max_mom"
DECAY_MOM_RATE = "decay_mom_rate"

WARMUP_MIN_LR = "warmup_min_lr"
WARMUP_MAX_LR = "warmup_max_lr"
WARMUP_NUM_STEPS = "warmup_num_steps"
WARMUP_TYPE = "warmup_type"
WARMUP_LOG_RATE = "log"
WARMUP_LINEAR_RATE = "linear"
WARMUP_MIN_RATIO = "warmup_min_ratio"
COS_MIN_RATIO = "cos_min_ratio"
TOTAL_NUM_STEPS = "total_num_steps"

__all__ = [
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    *(name for name in list(globals()) if name.isupper()),
    "add_tuning_arguments",
    "get_config_from_args",
    "get_lr_from_config",
    "get_torch_optimizer",
    "override_1cycle_params",
    "override_lr_range_test_params",
    "override_params",
    "override_warmupLR_params",
    "parse_arguments",
    "update_lr",
]

_RANGE_TEST = {
    LR_RANGE_TEST_MIN_LR: (0.001, "first rate"),
    LR_RANGE_TEST_STEP_RATE: (1.0, "growth of the rate per interval"),
    LR_RANGE_TEST_STEP_SIZE: (1000, "steps of one interval"),
    LR_RANGE_TEST_STAIRCASE: (False, "whole stairs instead of a line"),
}
_CYCLE = {
    CYCLE_FIRST_STEP_SIZE: (1000, "steps up"),
    CYCLE_FIRST_STAIR_COUNT: (-1, "stairs up"),
    CYCLE_SECOND_STEP_SIZE: (-1, "steps down; -1: as up"),
    CYCLE_SECOND_STAIR_COUNT: (-1, "stairs down; -1: as up"),
    DECAY_STEP_SIZE: (1000, "steps of one interval of decay"),
    CYCLE_MIN_LR: (0.01, "lowest rate"),
    CYCLE_MAX_LR: (0.1, "highest rate"),
    DECAY_LR_RATE: (0.0, "decay of the rate after the cycle"),
    CYCLE_MIN_MOM: (0.8, "lowest momentum"),
    CYCLE_MAX_MOM: (0.9, "highest momentum"),
    DECAY_MOM_RATE: (0.0, "decay of the momentum after the cycle"),
}
_WARM_UP: dict[str, tuple[Any, str]] = {
    WARMUP_MIN_LR: (0.0, "rate at the start"),
    WARMUP_MAX_LR: (0.001, "rate after the warm-up"),
    WARMUP_NUM_STEPS: (1000, "steps of the warm-up"),
    WARMUP_TYPE: (WARMUP_LOG_RATE, "log or linear"),
}
_COSINE = {
    WARMUP_MIN_RATIO: (0.01, "ratio at the start"),
    COS_MIN_RATIO: (0.01, "ratio at the end"),
}


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and the arguments of the five schedules, with DeepSpeed's defaults, to ``parser``."""
    group = parser.add_argument_group("Learning-rate schedules", "for get_config_from_args")
    group.add_argument("--lr_schedule", type=str, default=None, help=f"one of {', '.join(VALID_LR_SCHEDULES)}")
    for name, (default, text) in (_RANGE_TEST | _CYCLE | _WARM_UP | _COSINE).items():
        group.add_argument(f"--{name}", type=_flag if default is False else type(default), default=default, help=text)
    group.add_argument("--cycle_momentum", default=False, action="store_true", help="OneCycle moves momentum, too")
    return parser


def _flag(text: str) -> bool:
    """Read a flag. (DeepSpeed takes any text for true, "False" too.)"""
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no", ""):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Parse this program's command line for the schedules' arguments; return the rest, too."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def _override(names: Sequence[str], args: Any, params: MutableMapping[str, Any]) -> None:
    params.update({name: getattr(args, name) for name in names if getattr(args, name, None) is not None})


def override_lr_range_test_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Copy the arguments of LRRangeTest from ``args`` to ``params``."""
    _override(list(_RANGE_TEST), args, params)


def override_1cycle_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Copy the arguments of OneCycle from ``args`` to ``params``."""
    _override(list(_CYCLE), args, params)


def override_warmupLR_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Copy the arguments of WarmupLR from ``args`` to ``params``."""
    _override(list(_WARM_UP), args, params)


def override_params(args: Any, params: MutableMapping[str, Any]) -> None:
    """Copy the arguments of LRRangeTest, OneCycle and WarmupLR from ``args`` to ``params``."""
    _override([*_RANGE_TEST, *_CYCLE, *_WARM_UP], args, params)


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """Return the configuration's section "scheduler" of ``args``, or None and the reason."""
    kind = getattr(args, LR_SCHEDULE, None)
    if kind is None:
        return None, f"--{LR_SCHEDULE} not specified on command line"
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not supported LR schedule"
    params: dict[str, Any] = {}
    override = {LR_RANGE_TEST: override_lr_range_test_params, ONE_CYCLE: override_1cycle_params}
    override.get(kind, override_warmupLR_params)(args, params)
    if kind == ONE_CYCLE:  # -1 is DeepSpeed's word for "as the other half"
        params = {name: value for name, value in params.items() if value != -1}
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[Any, str]:
    """Return the rate that a section "scheduler" is about, or None and the reason."""
    for key in ("type", "params"):
        if key not in config:
            return None, f"LR schedule {key} not defined in config"
    kind = config["type"]
    if kind not in VALID_LR_SCHEDULES:
        return None, f"{kind} is not a valid LR schedule"
    name = {LR_RANGE_TEST: LR_RANGE_TEST_MIN_LR, ONE_CYCLE: CYCLE_MAX_LR}.get(kind, WARMUP_MAX_LR)
    return config["params"][name], ""


def update_lr(param_groups: Sequence[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the rate of each group, in place where it is a tensor; return the rates."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr.squeeze() if isinstance(lr, torch.Tensor) else lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


def get_torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return ``optimizer``, or the torch optimizer that it wraps. Raises: TypeError."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, torch.optim.Optimizer):
            return found
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer")
