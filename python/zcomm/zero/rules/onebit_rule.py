"""OnebitAdamRule: AdamW's fused rule up to the freeze. Afterwards zero/onebit updates, by this rule's numbers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from zcomm.optim.onebit import AdamNumbers, OnebitAdam, check_onebit_adam, numbers_of
from zcomm.zero.rules.rule import FusedRule

ARGUMENTS = [name for name in inspect.signature(OnebitAdam).parameters if name != "params"]
_FUSED = ("lr", "betas", "eps", "weight_decay")
_LATE = 1 << 40  # a step so late that the moments' correction is 1


class OnebitAdamRule(FusedRule):
    """1-bit Adam: ``zcomm.optim.OnebitAdam`` defines its options. Raises: ValueError, NotImplementedError for an
    impossible one."""

    exchanges = True
    fixed = ("state_dtype", "bias_correction")

    def __init__(self, args: dict[str, Any]) -> None:
        own = self._own = OnebitAdam([torch.zeros(1)], **args).defaults
        super().__init__("adamw", {key: own[key] for key in _FUSED})
        self.name = "onebit_adam"
        self.defaults |= {key: value for key, value in own.items() if key not in _FUSED}

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the caller's groups as FusedRule does. Raises: ValueError if their ``freeze_step`` differ."""
        adopted = super().adopt(groups)
        steps = {group.get("freeze_step", self.defaults["freeze_step"]) for group in adopted}
        if len(steps) > 1:
            raise ValueError(f"param groups have several freeze_step ({steps}); all gradients stay local from one on")
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        check_onebit_adam({**self._own, **group})

    def check_now(self, group: dict[str, Any]) -> None:
        super().check_now(group)
        check_onebit_adam(group)

    def is_local(self, groups: Sequence[dict[str, Any]]) -> bool:
        return any(group.get("step", 0) >= group["freeze_step"] for group in groups)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        hyper = super().prepare(number, group, grad_scale)
        if not group["bias_correction"]:
            hyper.step = _LATE
        return hyper

    def local_numbers(self, group: dict[str, Any], steps: int, grad_scale: float) -> AdamNumbers:
        return numbers_of(group, steps, grad_scale)
