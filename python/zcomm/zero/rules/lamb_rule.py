"""LambRule: LAMB on shards. The trust ratios of whole parameters are measured before a step.

The measurement computes the directions and changes nothing. The update computes them again, and scales them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from zcomm import _core
from zcomm.optim.lamb import Lamb, LambNumbers, check_group, direction, move_moments, numbers_of, trust_ratio
from zcomm.zero.layout.tiles import TileForm, TilePart
from zcomm.zero.rules.rule import SWITCHES, Rule

ARGUMENTS = [name for name in inspect.signature(Lamb).parameters if name != "params"]


@dataclass(frozen=True)
class _Hyper:
    """A group in one step. scale: of the gradients."""

    numbers: LambNumbers
    scale: float


class LambRule(Rule):
    """LAMB: ``zcomm.optim.Lamb`` defines its options. Raises: ValueError, NotImplementedError for an impossible one."""

    name = "lamb"
    arrays: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    indexed = True
    sums = 2  # squares of the weight, of the direction
    on_device = "torch"

    def __init__(self, args: dict[str, Any]) -> None:
        self.defaults = dict(Lamb([torch.zeros(1)], **args).defaults)

    def adopt(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the caller's groups without torch's switches."""
        adopted = [{key: value for key, value in group.items() if key not in SWITCHES} for group in groups]
        for group in adopted:
            self.check(group)
        self.scalars = [None] * len(adopted)
        return adopted

    def check(self, group: dict[str, Any]) -> None:
        check_group({**self.defaults, **group})

    def check_now(self, group: dict[str, Any]) -> None:
        self.check(group)

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> Any:
        group["step"] = group.get("step", 0) + 1
        return _Hyper(numbers_of({**self.defaults, **group}, group["step"]), grad_scale)

    def terms(self, form: TileForm, part: TilePart, hyper: Any) -> tuple[torch.Tensor, ...]:
        plain = hyper.hyper
        weight = form.part_master(part.weight, part.state, slice(part.begin, part.end))
        first, second = (array.clone() for array in self._arrays(form, part))
        move_moments(first, second, self._grad(part, plain), plain.numbers)
        return weight, direction(weight, first, second, plain.numbers)

    def factor(self, norms: tuple[float, ...], hyper: Any) -> float:
        return trust_ratio(norms[0], norms[1], hyper.numbers)

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> None:
        plain, inside = hyper.hyper, slice(part.begin, part.end)
        if part.squares is not None:
            raise AssertionError("the norm of the gradients is known before a rule that measures")
        weight = form.part_master(part.weight, part.state, inside)
        first, second = self._arrays(form, part)
        move_moments(first, second, self._grad(part, plain), plain.numbers)
        update = direction(weight, first, second, plain.numbers)
        weight.sub_(update.mul_(plain.numbers.rate * hyper.factor))
        form.set_part_master(part.weight, part.state, inside, weight)

    def step_on(self, stream: _core.Stream, form: TileForm, part: TilePart, hyper: Any) -> None:
        self.step(form, part, hyper)

    def _arrays(self, form: TileForm, part: TilePart) -> tuple[torch.Tensor, torch.Tensor]:
        inside, count = slice(part.begin, part.end), part.weight.numel()
        first, second = (form.array(part.state, count, name)[inside] for name in self.arrays)
        return first, second

    def _grad(self, part: TilePart, plain: _Hyper) -> torch.Tensor:
        grad = part.grad[part.begin : part.end]
        return grad if plain.scale == 1.0 else grad * plain.scale
