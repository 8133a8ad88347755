"""Loss scale of fp16 training: static, or dynamic with DeepSpeed's rule.

Once hysteresis is used up, an overflow halves the scale, never below the minimum. With ``raise_at_minimum``, which an
engine sets as DeepSpeed does, an overflow at the minimum raises. Otherwise training continues at the minimum, so that
one bad batch does not end a run; each skipped step is logged. The first good step since the last overflow and
``window`` more double the scale and restore hysteresis.
Source: Micikevicius et al. (arXiv:1710.03740) section 3.2; numbers of DeepSpeed's "fp16" section.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LossScale:
    """Rule of a dynamic scale.

    initial_power: the first scale is 2**initial_power.
    window: good steps, after the first, before it grows.
    hysteresis: overflows before it shrinks, counted again after it grows, or (consecutive) after every good step.
    minimum: lowest scale.
    raise_at_minimum: ``step()`` raises if the scale would shrink below the minimum, instead of skipping forever.
    """

    initial_power: int = 16
    window: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    consecutive: bool = False
    raise_at_minimum: bool = False

    def __post_init__(self) -> None:
        for name, low in (("initial_power", 0), ("window", 1), ("hysteresis", 1), ("minimum", 0)):
            if not getattr(self, name) >= low:
                raise ValueError(f"LossScale: {name}={getattr(self, name)} must be at least {low}")


class LossScaler:
    """The scale of one optimizer. rule: a LossScale, or a number that never changes. scales: losses are scaled."""

    def __init__(self, rule: LossScale | float, scales: bool = True) -> None:
        self.scales = scales
        self.dynamic = isinstance(rule, LossScale)  # the scale changes by itself
        self._rule = rule if isinstance(rule, LossScale) else LossScale(hysteresis=1)
        if not isinstance(rule, LossScale) and not (isinstance(rule, (int, float)) and rule > 0):
            raise ValueError(f"loss_scale={rule!r} must be a number more than 0, or a LossScale (dynamic)")
        self.scale = 2.0**rule.initial_power if isinstance(rule, LossScale) else float(rule)
        self._left = self._rule.hysteresis
        self._good = 0  # steps since the last overflow
        self.cur_iter = 0  # steps, skipped ones included (DeepSpeed's name)
        self._exhausted = False  # the last step has overflowed at the minimum

    @property
    def cur_scale(self) -> float:
        """``scale`` by one of DeepSpeed's names."""
        return self.scale

    @property
    def loss_scale(self) -> float:
        """``scale`` by another of DeepSpeed's names."""
        return self.scale

    @property
    def scale_window(self) -> int | None:
        """The rule's ``window`` by DeepSpeed's name; None: the scale is static."""
        return self._rule.window if self.dynamic else None

    def update(self, overflow: bool) -> None:
        """Adjust the scale after a step, applied or skipped."""
        self.cur_iter += 1
        rule = self._rule
        if not self.dynamic:
            return
        self._exhausted = overflow and self._left <= 1 and self.scale <= rule.minimum
        if overflow:
            self._good = 0
            if self._left > 1:
                self._left -= 1
            else:
                self.scale = max(self.scale / 2.0, rule.minimum)
            return
        self._good += 1
        if rule.consecutive:
            self._left = rule.hysteresis
        if self._good > 1 and (self._good - 1) % rule.window == 0:  # DeepSpeed counts from the second one
            self._left = rule.hysteresis
            self.scale *= 2.0

    def check(self, step: int, parameter: str) -> None:
        """Raise RuntimeError, once, if step ``step`` has overflowed at the minimum and the rule raises there.

        parameter: the first one with a gradient that was not finite.
        """
        exhausted, self._exhausted = self._exhausted, False
        if exhausted and self._rule.raise_at_minimum:
            raise RuntimeError(
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. "
                f"(step {step}: the gradient of {parameter} is not finite at loss scale {self.scale:g}, and the step "
                "was skipped: look for a loss or data that are not finite, lower the learning rate, or train in bf16; "
                '"fp16.min_loss_scale" and LossScale(minimum=) set the minimum)'
            )

    def state(self) -> dict[str, Any]:
        """Plain numbers, for a checkpoint."""
        return {"scale": self.scale, "hysteresis_left": self._left, "good_steps": self._good}

    def set_state(self, state: dict[str, Any], steps: int) -> None:
        """Restore a result of ``state`` after ``steps`` steps; a static scale does not change."""
        self.cur_iter = steps
        if self.dynamic:
            self.scale = float(state["scale"])
            self._left, self._good = int(state["hysteresis_left"]), int(state["good_steps"])
