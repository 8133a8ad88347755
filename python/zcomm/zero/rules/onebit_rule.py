"""Rules of the 1-bit optimizers: the fused rule, or LAMB's, at first. Afterwards zero/onebit updates, by their numbers.

The kind of a step follows only from its number and the options (``turn``), so all ranks and all loads agree on it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from zcomm.optim.onebit import (
    AdamNumbers,
    FrozenLamb,
    OnebitAdam,
    OnebitLamb,
    ZeroOneAdam,
    ZeroOneNumbers,
    averaged_steps,
    check_onebit_adam,
    check_onebit_lamb,
    check_zero_one_adam,
    frozen_lamb,
    local_interval,
    numbers_of,
    zero_one_numbers,
)
from zcomm.zero.layout.tiles import TileForm, TilePart
from zcomm.zero.rules.lamb_rule import LambRule
from zcomm.zero.rules.rule import FusedRule

_FUSED = ("lr", "betas", "eps", "weight_decay")
_LATE = 1 << 40  # a step so late that the moments' correction is 1


def arguments_of_class(kind: type) -> list[str]:
    """List the options that a caller may give a 1-bit optimizer."""
    return [name for name in inspect.signature(kind).parameters if name != "params"]


def _next_step(groups: Sequence[dict[str, Any]]) -> int:
    return 1 + max((group.get("step", 0) for group in groups), default=0)


def _check_equal(groups: Sequence[dict[str, Any]], defaults: dict[str, Any], names: Sequence[str]) -> None:
    """Raise ValueError if groups have several values of an option that decides for all gradients."""
    for name in names:
        found = {group.get(name, defaults[name]) for group in groups}
        if len(found) > 1:
            raise ValueError(f"param groups have several {name} ({found}); it decides for all gradients together")


class _OneBitFused(FusedRule):
    """AdamW's fused rule with options of ``kind``. whole_run: options that are the same for all groups."""

    exchanges = True
    fixed: tuple[str, ...] = ("state_dtype", "bias_correction")
    kind: type[torch.optim.Optimizer]
    check_own: Callable[[dict[str, Any]], None]
    whole_run: tuple[str, ...]

    def __init__(self, args: dict[str, Any]) -> None:
        own = self._own = self.kind([torch.zeros(1)], **args).defaults
        super().__init__("adamw", {key: own[key] for key in _FUSED})
        self.name = type(self).name
        self.defaults |= {key: value for key, value in own.items() if key not in _FUSED}

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        adopted = super().adopt(groups)
        _check_equal(adopted, self.defaults, self.whole_run)
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        type(self).check_own({**self._own, **group})

    def check_now(self, group: dict[str, Any]) -> None:
        super().check_now(group)
        type(self).check_own(group)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        hyper = super().prepare(number, group, grad_scale)
        if not group["bias_correction"]:
            hyper.step = _LATE
        return hyper


class OnebitAdamRule(_OneBitFused):
    """1-bit Adam: ``zcomm.optim.OnebitAdam`` defines its options. Raises: ValueError, NotImplementedError for an
    impossible one."""

    name = "onebit_adam"
    kind = OnebitAdam
    check_own = staticmethod(check_onebit_adam)
    whole_run = ("freeze_step",)

    def turn(self, groups: Sequence[dict[str, Any]]) -> str:
        return "signs" if _next_step(groups) > groups[0]["freeze_step"] else "plain"

    def local_numbers(self, group: dict[str, Any], steps: int, grad_scale: float) -> AdamNumbers:
        return numbers_of(group, steps, grad_scale)


class ZeroOneAdamRule(_OneBitFused):
    """0/1 Adam: ``zcomm.optim.ZeroOneAdam`` defines its options. Raises: as OnebitAdamRule."""

    name = "zero_one_adam"
    kind = ZeroOneAdam
    check_own = staticmethod(check_zero_one_adam)
    whole_run = ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper")
    fixed = ("state_dtype", "bias_correction", *whole_run)  # the intervals follow from all steps so far

    def turn(self, groups: Sequence[dict[str, Any]]) -> str:
        step, options = _next_step(groups), groups[0]
        late = step - options["var_freeze_step"]
        if late > 0:
            interval = local_interval(late, options["local_step_scaler"], options["local_step_clipper"])
            return "apart" if step % interval else "join"
        interval, _ = averaged_steps(step, options["var_update_scaler"])
        if step % interval:
            return "signs"
        return "plain" if interval == 1 else "mean"

    def freezes(self, turn: str) -> bool:
        return turn in ("apart", "join")

    def local_numbers(self, group: dict[str, Any], steps: int, grad_scale: float) -> ZeroOneNumbers:
        until = min(group["step"], group["var_freeze_step"])
        _, averaged = averaged_steps(until, group["var_update_scaler"])
        return zero_one_numbers(group, steps, grad_scale, averaged)


class OnebitLambRule(LambRule):
    """1-bit LAMB: ``zcomm.optim.OnebitLamb`` defines its options. Raises: as OnebitAdamRule.

    Each parameter has two scalars, by its name: "coefficient", the average of the warm-up's trust ratios, and "factor"
    of the last step after the freeze.
    """

    name = "onebit_lamb"
    arrays = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    exchanges = True
    fixed = ("bias_correction",)

    def __init__(self, args: dict[str, Any]) -> None:
        self._own = OnebitLamb([torch.zeros(1)], **args).defaults
        super().__init__({key: value for key, value in self._own.items() if key in _LAMB})
        self.defaults |= self._own
        self._names: list[list[str]] = []  # of the parameters, by group
        self._betas: dict[int, float] = {}  # of the coefficients, by group
        self._of: dict[str, dict[str, float]] = {}

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        adopted = super().adopt(groups)
        _check_equal(adopted, self.defaults, ("freeze_step",))
        self._names = [[] for _ in adopted]
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        check_onebit_lamb({**self._own, **group})

    def check_param(self, group: int, name: str, param: torch.Tensor) -> None:
        self._names[group].append(name)
        self._of[name] = dict(_BEGIN)

    def turn(self, groups: Sequence[dict[str, Any]]) -> str:
        return "signs" if _next_step(groups) > groups[0]["freeze_step"] else "plain"

    def begins(self, groups: Sequence[dict[str, Any]]) -> bool:
        return _next_step(groups) == 1 + int(groups[0]["freeze_step"])

    def measured(self, factors: Mapping[str, float]) -> None:
        for number, names in enumerate(self._names):
            beta = self._betas.get(number, 0.0)
            for name in names:
                ratio = factors.get(name, 1.0)
                if ratio != 1.0:
                    own = self._of[name]
                    own["coefficient"] = beta * own["coefficient"] + (1.0 - beta) * ratio

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        self._betas[number] = float(group["coeff_beta"])
        return super().prepare(number, group, grad_scale)

    def local_numbers(self, group: dict[str, Any], steps: int, grad_scale: float) -> FrozenLamb:
        return frozen_lamb(group, steps, grad_scale)

    def _arrays(self, form: TileForm, part: TilePart) -> tuple[torch.Tensor, torch.Tensor]:
        inside, count = slice(part.begin, part.end), part.weight.numel()
        first, second = (form.array(part.state, count, name)[inside] for name in self.arrays[:2])
        return first, second

    # --- scalars of parameters --------------------------------------------------------------------------------

    def scalars_of_param(self, name: str) -> dict[str, float]:
        return self._of[name]

    def progress(self) -> list[dict[str, Any]] | None:
        return [
            {f"{key}/{name}": value for name in names for key, value in self._of[name].items()} for names in self._names
        ]

    def check_progress(self, progress: list[dict[str, Any]] | None) -> None:
        for saved in progress or []:
            for key, value in saved.items():
                if key.partition("/")[0] not in _BEGIN or not isinstance(value, (int, float)):
                    raise ValueError(f"progress has {key}={value!r}; {self.name} has {' and '.join(_BEGIN)} by name")

    def set_progress(self, progress: list[dict[str, Any]] | None) -> None:
        self.check_progress(progress)
        saved = {key: value for each in progress or [] for key, value in each.items()}
        for name, own in self._of.items():
            own.update({key: float(saved.get(f"{key}/{name}", value)) for key, value in _BEGIN.items()})


_BEGIN = {"coefficient": 0.0, "factor": 1.0}
_LAMB = ("lr", "betas", "eps", "weight_decay", "bias_correction", "max_coeff", "min_coeff")
