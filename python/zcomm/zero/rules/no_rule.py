"""NoRule: the rule of a ZeroOptimizer without an optimizer. It keeps and moves the weights of a model that is not
trained, and has no step.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zcomm.zero.layout.tiles import TileForm, TilePart
from zcomm.zero.rules.rule import Rule

WHY = (
    'there is no optimizer here (optimizer=None, or no section "optimizer"): give one, with parameters that require '
    "gradients, to train"
)


class NoRule(Rule):
    """No update, and no state."""

    name = "none"
    arrays = ()
    on_device = "stream"

    def __init__(self) -> None:
        self.defaults = {}
        self.scalars = [None]

    def check(self, group: dict[str, Any]) -> None:
        return

    def prepare(self, number: int, group: dict[str, Any], grad_scale: float) -> NoReturn:
        raise RuntimeError(f"step(): {WHY}")

    def step(self, form: TileForm, part: TilePart, hyper: Any) -> NoReturn:
        raise RuntimeError(f"step(): {WHY}")

    def step_on(self, stream: Any, form: TileForm, part: TilePart, hyper: Any) -> NoReturn:
        raise RuntimeError(f"step(): {WHY}")
