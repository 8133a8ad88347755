"""The order in which a pass uses units, learned from the last pass, so that the next units can be prefetched.

A pass begins with the model's forward. If a program calls only submodules, a pass begins with the first use after a
step or, outside backward, with a change of grad mode. Without gradients no step ends a pass, so the return to its first
unit begins the next one. Passes with and without gradients have orders of their own. Uses of one unit in a row are one
use: the parts of a batch (zcomm.split_batch), or a backward that recomputes the forward.
Thread rule: as UnitManager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class UseOrder:
    """The order in which a pass uses units. ``coming``: the units that this pass will use if it repeats the last one;
    empty once it differs."""

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
        """Return the order of the last pass with gradients, which predicts the next one. Empty: none was seen."""
        return self.trace if self.trace and self._grad_mode else self._last.get(True, ())

    def use(self, unit: int) -> None:
        if self._begins(unit):
            self.begin()
        if self.trace and self.trace[-1] == unit:
            return
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
