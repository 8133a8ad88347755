"""The order in which a pass uses units, learned from the last one: what is coming can be gathered ahead.

A pass begins with the model's forward. A program may call submodules alone: then the first use after a step begins
one, and, outside of backward, a change of grad mode. Without gradients, where no step ends anything, the return to the
unit that was the first. Passes with and without gradients have orders of their own.
Thread rule: as UnitManager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class UseOrder:
    """The order in which a pass uses units. ``coming``: units that this pass will use, if it goes on as the last one;
    else empty."""

    def __init__(self) -> None:
        self.trace: list[int] = []
        self.coming: Sequence[int] = ()
        self._last: dict[bool, list[int]] = {}  # by grad mode
        self._grad_mode = True
        self._in_model = False  # its forward runs
        self._ended = True

    def begin(self, in_model: bool = False) -> None:
        if self.trace:
            self._last[self._grad_mode] = self.trace
        self.trace, self.coming = [], ()
        self._grad_mode = torch.is_grad_enabled()
        self._in_model, self._ended = in_model, False

    def leave_model(self) -> None:
        self._in_model = False

    def end(self) -> None:
        """End the pass at a step: the next use begins a new one."""
        self._in_model, self._ended = False, True

    def first(self) -> Sequence[int]:
        """Return the order of the last pass with gradients: what the next one begins with. Empty: none was seen."""
        return self.trace if self.trace and self._grad_mode else self._last.get(True, ())

    def use(self, unit: int) -> None:
        if self._begins(unit):
            self.begin()
        self.trace.append(unit)
        last = self._last.get(self._grad_mode, [])
        here = len(self.trace) - 1
        follows = here < len(last) and last[here] == unit
        self.coming = last[here + 1 :] if follows else ()

    def _begins(self, unit: int) -> bool:
        if self._in_model or torch._C._current_graph_task_id() >= 0:
            return False
        grad_mode = torch.is_grad_enabled()
        again = not grad_mode and bool(self.trace) and self.trace[0] == unit
        return self._ended or again or grad_mode != self._grad_mode
