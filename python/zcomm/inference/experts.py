"""Experts of a streamed model: only the matrices of experts that tokens are routed to are read.

[Note: routed experts] transformers keeps the experts of a block as weights of three dimensions. Their module's forward
is given the routed experts of each token (``top_k_index``). Its "eager" form indexes the weights expert by
expert, in ascending order, and ``Units(indexed=)`` gathers just these matrices. A hook reads the routes before that
forward, so that the next matrices are read while one is used.
Other forms use whole weights, and ranks with other tokens would index other experts. So streams set "eager", on one
rank. Everywhere else all experts of a block are gathered with it.
Thread rule: the main thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.comm.job import init
from zcomm.zero.module_hook import Hook
from zcomm.zero.units.store import UnitStore

_ROUTES = "top_k_index"


def routed_modules(model: nn.Module, comm: Communicator | None) -> list[nn.Module]:
    """Return the modules of experts that index their weights by routes, after the model was set to do so. None of
    several ranks. comm: None: of the job, which is joined if there are such modules."""
    found = routed(model)
    if found and (comm or init()).world_size > 1:
        return []
    choose: Any = getattr(model, "set_experts_implementation", None)
    if found and choose is not None:
        choose("eager")
    return [module for module in found if _form(module) == "eager"]


def routed(model: nn.Module) -> list[nn.Module]:
    """Return the modules of experts that are given routes."""
    return [module for module in model.modules() if _is_routed(module)]


def _is_routed(module: nn.Module) -> bool:
    count, own = getattr(module, "num_experts", None), list(module.parameters(recurse=False))
    if not any(param.dim() == 3 and param.shape[0] == count for param in own):
        return False
    return _ROUTES in inspect.signature(type(module).forward).parameters


def _form(module: nn.Module) -> str | None:
    config: Any = getattr(module, "config", None)
    return "eager" if config is None else getattr(config, "_experts_implementation", None)


class RoutedExperts:
    """The routed experts of a stream. nbytes: read of them so far, as the routes count them."""

    def __init__(
        self, modules: Sequence[nn.Module], store: UnitStore, nbytes_of: Callable[[nn.Parameter], int]
    ) -> None:
        self.nbytes = 0
        self._rows, self._names = store.weights.row_weights, [_Names(module, store, nbytes_of) for module in modules]
        self._handles = [
            names.module.register_forward_pre_hook(Hook(self._before(names)), with_kwargs=True) for names in self._names
        ]

    def _before(self, names: _Names) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            routes = names.routes(args, kwargs)
            if routes is None:
                return
            count: int = names.count
            chosen = [number for number in routes.unique().tolist() if 0 <= number < count]
            self.nbytes += len(chosen) * names.nbytes
            self._rows.expect([(param, number) for number in chosen for param in names.params])

        return before

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Names:
    """A module of experts: its weights by matrix, and the place of the routes in its arguments.

    nbytes: of an expert.
    """

    def __init__(self, module: nn.Module, store: UnitStore, nbytes_of: Callable[[nn.Parameter], int]) -> None:
        indexed = {id(weight.param) for weight in store.memory.rows.weights}
        own = module.parameters(recurse=False)
        self.module, self.count = module, int(getattr(module, "num_experts", 0))
        self.params = [param for param in own if id(param) in indexed and param.dim() == 3]
        self.nbytes = sum(nbytes_of(param) for param in self.params) // max(1, self.count)
        self._place = list(inspect.signature(type(module).forward).parameters).index(_ROUTES) - 1

    def routes(self, args: Sequence[Any], kwargs: Any) -> torch.Tensor | None:
        found = args[self._place] if len(args) > self._place else kwargs.get(_ROUTES)
        return found if isinstance(found, torch.Tensor) else None
