"""Hooks that tie modules to their units: gather before forward and before backward, release when done.

Forward: a module's pre-hook gathers its unit. Backward: a hook on the gradient of the module's outputs gathers it
again; it is released when the last of its parameters has its gradient, at the latest when backward ends.
Frozen and unused parameters (an expert without tokens) have no gradient that would say so: every unit is released when
backward comes to the next one. Autograd runs what was made last first, so nothing of the one unit is left to do then,
unless the next one's forward ran inside of it. Where backward comes another way, what autograd saved of a unit's memory
gathers it (see unit_guard.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm.zero import unit_guard
from zcomm.zero.outside import Watch
from zcomm.zero.unit import Unit
from zcomm.zero.unit_choice import UnitChoice, tensors_in
from zcomm.zero.units import UnitStore

logger = logging.getLogger("zcomm")


class UnitHooks:
    """Installed on construction, removed by ``close``."""

    def __init__(self, model: nn.Module, choices: list[UnitChoice], store: UnitStore) -> None:
        self._store = store
        self._armed = False
        self._waiting: dict[int, set[int]] = {}
        self._awaiting: list[tuple[Unit, nn.Parameter]] = []  # that have got a shape without memory
        self._watch = Watch(model, store)
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(lambda *_: store.end_forward(), always_call=True),
        ]
        self._now: Unit | None = None  # the one that backward is in
        self._inside: list[tuple[Unit, unit_guard.Hooks | None]] = []  # whose forward runs, outermost first
        self._guards = store.gives_way and unit_guard.possible()
        if store.gives_way and not self._guards:
            logger.info("stage 3 by units: before torch 2.8 backward must enter a unit by its module's outputs")
        for unit, choice in zip(store.units, choices, strict=True):
            for module in choice.modules:
                self._handles.append(module.register_forward_pre_hook(self._enter(unit)))
                if unit.index > 0:
                    self._handles.append(module.register_forward_hook(self._leave(unit), always_call=True))
            for param in choice.params:
                if param.requires_grad:
                    if self._guards and unit.index > 0:
                        self._handles.append(param.register_hook(self._awaits(unit, param)))
                    self._handles.append(param.register_post_accumulate_grad_hook(self._reached(unit)))

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._armed and torch._C._current_graph_task_id() < 0:
            self._end_backward()  # a backward pass that ended with an exception
        self._store.begin_pass()

    def _enter(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._store.use(unit)
            if unit.index > 0:
                if self._inside and self._inside[-1][0] is not unit:
                    self._inside[-1][0].surrounds = True
                unit.in_forward += 1
                self._inside.append((unit, self._guard(unit)))

        return enter

    def _guard(self, unit: Unit) -> unit_guard.Hooks | None:
        if not self._guards or unit.keep or not torch.is_grad_enabled():
            return None
        return unit_guard.push(unit.span, self._store.place_of(unit), partial(self._before_backward, unit))

    def _leave(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            unit.in_forward = max(0, unit.in_forward - 1)
            for at in reversed(range(len(self._inside))):
                if self._inside[at][0] is unit:
                    unit_guard.pop(self._inside.pop(at)[1])
                    break
            place = self._store.place_of(unit)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit, place))

        return leave

    def _before_backward(self, unit: Unit, place: object, grad: torch.Tensor | None = None) -> None:
        """Backward comes to what the unit did at ``place``."""
        if unit.in_backward and self._store.place_of(unit) is place:
            return
        if torch._C._current_graph_task_id() >= 0:
            self._arm()
            if self._now is not None and not self._now.surrounds:
                self._now.in_backward = False
            self._now = unit
        self._store.return_to(unit, place)
        self._store.use(unit)
        unit.in_backward = self._armed
        self._waiting[unit.index] = {id(param) for param, _ in unit.views}

    def _awaits(self, unit: Unit, param: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def awaits(grad: torch.Tensor) -> None:
            if self._store.awaits(unit, param):
                self._arm()
                self._awaiting.append((unit, param))

        return awaits

    def _reached(self, unit: Unit) -> Callable[[nn.Parameter], None]:
        def reached(param: nn.Parameter) -> None:
            waiting = self._waiting.get(unit.index)
            if waiting is not None:
                waiting.discard(id(param))
                if not waiting:
                    unit.in_backward = False
            self._store.reached(unit, param)

        return reached

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._armed = False
        self._now = None
        self._waiting.clear()
        for unit, param in self._awaiting:  # gradients that only passed by (autograd.grad) left shapes without memory
            self._store.reached(unit, param)
        self._awaiting.clear()
        for unit in self._store.units:
            unit.in_backward = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.close()
