"""ScheduleWatch: detects a program that steps or overwrites the learning rates which the engine's schedule sets."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any


class ScheduleWatch:
    """Comparison of count and rates before each step of the schedule with their values after its previous step.

    One change is legitimate (a resume, a rate by hand). Two in a row mean a loop written for a schedule that the engine
    does not step, so ``before`` logs a warning, once.
    """

    def __init__(self) -> None:
        self._left: tuple[Any, list[float]] | None = None
        self._in_a_row = 0
        self._warned = False

    def before(self, schedule: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        """Check for changes by the program since ``after``."""
        now, left = _state(schedule, groups), self._left
        self._in_a_row = self._in_a_row + 1 if left not in (None, now) else 0
        if left is None or self._in_a_row < 2 or self._warned:
            return
        self._warned = True
        name = type(schedule).__name__
        done = "was stepped" if now[0] != left[0] else f"set the rates {left[1]}, and they are {now[1]} now"
        logging.getLogger("zcomm").warning(
            "the engine's schedule %s %s between two engine.step() calls: engine.step() steps it after each update, so "
            "step it nowhere else; or give the engine no schedule, and set the rates yourself",
            name,
            done,
        )

    def after(self, schedule: Any, groups: Sequence[Mapping[str, Any]]) -> None:
        """Store count and rates after the schedule's step."""
        self._left = _state(schedule, groups)


def _state(schedule: Any, groups: Sequence[Mapping[str, Any]]) -> tuple[Any, list[float]]:
    count = getattr(schedule, "last_batch_iteration", getattr(schedule, "last_epoch", None))
    return count, [float(group["lr"]) for group in groups]
