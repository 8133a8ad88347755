"""Parameters that are read outside of their unit (stage 3 by units): ``self.other.weight`` in some module's forward.

A unit is whole only while its own module runs, and its slot may be another's a moment later. Whoever reads one of its
parameters as a module's attribute meanwhile gets a copy, gathered then, whose gradient goes to the parameter. This
holds from the first forward of a step to ``step()``; at other times a parameter that is not gathered is empty, as it is
for those who read it without its module (a list of parameters kept aside): torch then says that shapes do not fit.
A gather is collective: all ranks must read in the same order. A module that is called apart from its unit's
forward reads its own parameters in this way, too.
Source: DeepSpeed's ZeROOrderedDict of external parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from zcomm.zero.unit import Unit, UnitState
from zcomm.zero.units import UnitStore

_copied = WeakIdKeyDictionary()  # copies that somebody has, and of what


def original(tensor: torch.Tensor) -> torch.Tensor:
    """The parameter that ``tensor``, read outside of its unit, is a copy of; else ``tensor`` itself."""
    found: torch.Tensor = _copied.get(tensor, tensor)
    return found


class _Copy(torch.autograd.Function):
    """A copy of a parameter that is whole now; it need not be in backward, but must have its shape there."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, unit: Unit) -> torch.Tensor:
        ctx.param, ctx.unit = param, unit
        return param.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.unit.state is not UnitState.GATHERED and ctx.param.numel() != grad.numel():
            # Addresses without memory; when the gradient is there, the unit's hook takes them away again.
            ctx.param.data = next(view for param, view in ctx.unit.views if param is ctx.param)
        return grad, None


class WatchedParameters(dict[str, Any]):
    """A module's ``_parameters`` that gathers on access."""

    def __init__(self, plain: dict[str, Any], store: UnitStore, units: dict[int, Unit]) -> None:
        super().__init__(plain)
        self._store = store
        self._units = units

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        unit = self._units.get(id(param))
        if unit is None or not unit.idle or not self._store.needs_gather(unit, param):
            return param
        self._store.use(unit)
        if torch.is_grad_enabled() and param.requires_grad:
            copy = _Copy.apply(param, unit)  # type: ignore[no-untyped-call]
            copy.grad_fn._set_sequence_nr(2**64 - 1)  # as a parameter's own: backward takes it as soon as it can
        else:
            copy = param.detach().clone()
        _copied[copy] = param
        return copy

    def __reduce__(self) -> Any:  # copies of the model are ordinary
        return dict, (dict(self),)


class Watch:
    """Installed on the modules that hold parameters of units; ``close`` takes it away."""

    def __init__(self, model: nn.Module, store: UnitStore) -> None:
        units = {id(param): unit for unit in store.units[1:] for param, _ in unit.views}
        self._modules: list[nn.Module] = []
        for module in model.modules():
            if any(id(param) in units for param in module._parameters.values()):
                module._parameters = WatchedParameters(module._parameters, store, units)
                self._modules.append(module)

    def close(self) -> None:
        for module in self._modules:
            module._parameters = dict(module._parameters)
        self._modules.clear()
