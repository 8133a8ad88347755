"""Hooks that tie modules to their units: gather before forward and before backward, release when done.

Forward: a module's pre-hook gathers its unit. Backward: a hook on the gradient of the module's outputs gathers it
again. The unit is released when its last parameter has its gradient, at the latest when backward ends.
Frozen and unused parameters (an expert without tokens) receive no gradient, so a unit is also released when backward
enters the next one. Backward of the released unit is complete then, because autograd runs the newest nodes first.
Units with another unit's forward inside their own are the exception. If backward enters a unit otherwise than by its
outputs, the views that autograd saved gather it (see saved_tensors.py).
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.layout.unit_policy import tensors_in
from zcomm.zero.module_hook import Hook
from zcomm.zero.second_owner import second_owner
from zcomm.zero.units import saved_tensors
from zcomm.zero.units.life import UnitManager
from zcomm.zero.units.unit import Unit

logger = logging.getLogger("zcomm")


class UnitHooks:
    """Installed on construction, removed by ``remove``."""

    def __init__(self, model: nn.Module, choices: list[UnitChoice], life: UnitManager) -> None:
        self._life = life
        self._armed = False
        self._waiting: dict[int, set[int]] = {}
        self._model = model
        self.handles: list[Any] = [
            model.register_forward_pre_hook(Hook(self._begin)),
            model.register_forward_hook(Hook(self._end), always_call=True),
            register_module_parameter_registration_hook(_weakly(self._registered)),
        ]
        life.weights.hooks = self
        self._now: Unit | None = None  # the unit that backward is in
        self._inside: list[tuple[Unit, saved_tensors.Hooks | None]] = []  # units in forward now, outermost first
        self._guards = life.memory.gives_way and saved_tensors.possible()
        if life.memory.gives_way and not self._guards:
            logger.info("stage 3 by units: before torch 2.8 backward must enter a unit by its module's outputs")
        for unit, choice in zip(life.units, choices, strict=True):
            for module in choice.modules:
                enter, first = Hook(self._enter(unit)), unit.index > 0  # hooks of the program may read the weights
                self.handles.append(module.register_forward_pre_hook(enter, prepend=first))
                self.handles.append(module.register_forward_hook(Hook(self._leave(unit)), always_call=True))
            for param in choice.params:
                if param.requires_grad and not choice.by_rows:  # a unit by rows is never whole
                    self.handles.append(param.register_post_accumulate_grad_hook(self._reached(unit)))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.clear_interrupted(calls=1)
        self._life.begin_pass()
        self._began(self._life.units[0])

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._life.end_forward()
        self._ended(self._life.units[0])

    def _began(self, unit: Unit) -> None:
        """Begin the forward of a module that needs the unit."""
        self._life.running += 1  # first: 0 must imply that no unit is in forward, also after an interrupt
        unit.in_forward += 1
        self._life.show_or_hide(unit)

    def _ended(self, unit: Unit) -> None:
        unit.in_forward = max(0, unit.in_forward - 1)
        self._life.running = max(0, self._life.running - 1)
        self._life.show_or_hide(unit)

    def clear_interrupted(self, calls: int = 0) -> None:
        """Forget a backward pass that ended with an exception, and forwards that an interrupt ended, because torch
        called no hooks for them. calls: number of the model's calls that the caller knows to be running."""
        if torch._C._current_graph_task_id() >= 0:
            return
        if self._armed:
            self._end_backward()
        if self._life.running and _calls_of(self._model) <= calls:
            self._forget_forwards()

    def _forget_forwards(self) -> None:
        while self._inside:
            saved_tensors.pop(self._inside.pop()[1])
        self._life.running = 0
        for unit in self._life.units:
            unit.in_forward = 0
            self._life.show_or_hide(unit)

    def _enter(self, unit: Unit) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._life.use(unit)
            self._began(unit)
            if unit.index > 0:
                if self._inside and self._inside[-1][0] is not unit:
                    self._inside[-1][0].surrounds = True
                self._inside.append((unit, self._guard(unit)))

        return enter

    @contextmanager
    def using(self, unit: Unit) -> Iterator[Callable[[torch.Tensor], None]]:
        """Run a function that uses the unit as one of its modules would. The yielded function takes its outputs."""
        outputs: list[torch.Tensor] = []
        self._enter(unit)(self._model, None)
        try:
            yield outputs.append
        finally:
            self._leave(unit)(self._model, None, outputs)

    def _guard(self, unit: Unit) -> saved_tensors.Hooks | None:
        if not self._guards or unit.keep or not torch.is_grad_enabled():
            return None
        return saved_tensors.push(unit.span, self._life.memory.slot_of(unit), partial(self._before_backward, unit))

    def _leave(self, unit: Unit) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._ended(unit)
            if unit.index == 0:
                return
            for at in reversed(range(len(self._inside))):
                if self._inside[at][0] is unit:
                    saved_tensors.pop(self._inside.pop(at)[1])
                    break
            if self._guards and type(module) is nn.Embedding:
                return  # backward reads only the indices
            slot = self._life.memory.slot_of(unit)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, unit, slot))

        return leave

    def _before_backward(self, unit: Unit, slot: object, grad: torch.Tensor | None = None) -> None:
        """Prepare for backward of the forward that the unit ran in ``slot``."""
        if unit.in_backward and self._life.memory.slot_of(unit) is slot:
            return
        if torch._C._current_graph_task_id() >= 0:
            self._arm()
            if self._now is not None and not self._now.surrounds:
                self._rests(self._now)
            self._now = unit
        self._life.memory.return_to(unit, slot)
        self._life.use(unit)
        unit.in_backward = self._armed
        self._life.show_or_hide(unit)
        self._waiting[unit.index] = {id(param) for param, _ in unit.views}

    def _rests(self, unit: Unit) -> None:
        """End the unit's backward."""
        unit.in_backward = False
        self._life.show_or_hide(unit)

    def _reached(self, unit: Unit) -> Callable[[nn.Parameter], None]:
        def reached(param: nn.Parameter) -> None:
            waiting = self._waiting.get(unit.index)
            if waiting is not None:
                waiting.discard(id(param))
                if not waiting:
                    self._rests(unit)
            self._life.reached(unit, param)

        return reached

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            root = self._life.units[0]
            root.in_backward = True
            self._life.show_or_hide(root)

    def _end_backward(self) -> None:
        self._armed = False
        self._now = None
        self._waiting.clear()
        for unit in self._life.units:
            self._rests(unit)

    def _registered(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        """Copy the values of a newly registered parameter (``load_state_dict(assign=True)``) into the store's parameter
        that it would replace, and keep the latter."""
        old = module._parameters.get(name)
        if old is None or param is None or param is old or not self._life.weights.has(old):
            return None
        if self._life.weights.has(param):
            return None  # tied
        found = second_owner((), [(self._life.weights.name(old), param)])
        if found and not _is_loading():  # load_state_dict copies the values of DTensors
            raise RuntimeError(f"after ZeroOptimizer was built, {found}")
        old.data = param.detach()
        return old

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def _weakly(method: Callable[..., Any]) -> Any:
    """Return a function that calls ``method`` while its object lives, for torch's hooks of all modules."""
    ref = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        found = ref()
        return None if found is None else found(*args)

    return call


def _is_loading() -> bool:
    """Return True inside ``load_state_dict``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not nn.Module._load_from_state_dict.__code__:
        frame = frame.f_back
    return frame is not None


def _calls_of(module: nn.Module) -> int:
    """Count the running calls of ``module``."""
    calls = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return calls
