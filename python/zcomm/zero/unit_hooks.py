"""Hooks that tie modules to their units: gather before forward and before backward, release when done.

Forward: a module's pre-hook gathers its unit. Backward: a hook on the gradient of the module's outputs gathers it
again; it is released when the last of its parameters has its gradient, at the latest when backward ends.
Frozen and unused parameters (an expert without tokens) have no gradient that would say so: every unit is released when
backward comes to the next one. Autograd runs what was made last first, so nothing of the one unit is left to do then,
unless the next one's forward ran inside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zcomm.zero.outside import Watch
from zcomm.zero.unit_choice import UnitChoice, tensors_in
from zcomm.zero.units import Unit, UnitStore


class UnitHooks:
    """Installed on construction, removed by ``close``."""

    def __init__(self, model: nn.Module, choices: list[UnitChoice], store: UnitStore) -> None:
        self._store = store
        self._armed = False
        self._waiting: dict[int, set[int]] = {}
        self._watch = Watch(model, store)
        self._handles: list[Any] = [model.register_forward_pre_hook(self._begin)]
        self._frozen: set[int] = set()  # units with frozen parameters
        self._now: Unit | None = None  # the one that backward is in
        self._inside: list[Unit] = []  # whose forward runs, outermost first
        for unit, choice in zip(store.units, choices, strict=True):
            for module in choice.modules:
                self._handles.append(module.register_forward_pre_hook(self._enter(unit)))
                if unit.index > 0:
                    self._handles.append(module.register_forward_hook(self._leave(unit), always_call=True))
            for param in choice.params:
                if param.requires_grad:
                    self._handles.append(param.register_post_accumulate_grad_hook(self._reached(unit)))
                else:
                    self._frozen.add(unit.index)

    def _begin(self, module: nn.Module, args: Any) -> None:
        if self._armed and torch._C._current_graph_task_id() < 0:
            self._end_backward()  # a backward pass that ended with an exception
        self._store.begin_pass()

    def _enter(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._store.use(unit)
            if unit.index > 0:
                if self._inside and self._inside[-1] is not unit:
                    self._inside[-1].surrounds = True
                self._inside.append(unit)
                unit.in_forward += 1

        return enter

    def _leave(self, unit: Unit) -> Callable[..., None]:
        def before_backward(place: object, grad: torch.Tensor) -> None:
            if unit.in_backward and self._store.place_of(unit) is place:
                return
            self._arm()
            if self._now is not None and not self._now.surrounds:
                self._now.in_backward = False
            self._now = unit
            self._store.return_to(unit, place)
            self._store.use(unit)
            unit.in_backward = True
            self._waiting[unit.index] = {id(param) for param, _ in unit.views}

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            unit.in_forward = max(0, unit.in_forward - 1)
            if unit in self._inside:
                self._inside.remove(unit)
            place = self._store.place_of(unit)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(before_backward, place))

        return leave

    def _reached(self, unit: Unit) -> Callable[[nn.Parameter], None]:
        def reached(param: nn.Parameter) -> None:
            waiting = self._waiting.get(unit.index)
            if waiting is not None:
                waiting.discard(id(param))
                if not waiting and unit.index not in self._frozen:
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
        for unit in self._store.units:
            unit.in_backward = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch.close()
