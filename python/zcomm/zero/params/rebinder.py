"""ParamRebinder: comparison of the model's parameters with the store's, and adoption of replacements.

``vector_to_parameters``, ``model.half().float()`` and ``p.data = t`` give a parameter other memory;
``load_state_dict(assign=True)`` gives the module another Parameter. The optimizer would then train memory that the
model no longer reads. So each step, save and look compares first. New values are the program's edit of the weights
([Note: edited weights] in stores.py), and the parameter is attached again.
Cost: a comparison of address, dtype, shape and strides for each parameter (about 1 us).
Thread rule: as ZeroOptimizer.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import stateless

from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.local_param import as_given, as_local, fits
from zcomm.zero.params.stores import ParameterStore
from zcomm.zero.second_owner import second_owner
from zcomm.zero.update_hooks import UpdateHooks

logger = logging.getLogger("zcomm")
_FUNCTIONAL_CALL = stateless._functional_call.__code__


class Reducer(Protocol):
    """The reducer of gradients, as the rebinder calls it."""

    def take_over(self, index: int, grad: torch.Tensor | None) -> None:
        """Count a gradient that autograd left on a tensor without hooks."""

    def hook_again(self, index: int) -> None:
        """Set the hooks again of a parameter that has lost them."""


class ParamRebinder:
    """Binding of the model's parameters to a store.

    params, names: of the store, in the numbering of ``geometry``. dtype, device: of the weights. updates: may still
    read or write the weights.
    """

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[nn.Parameter],
        names: Sequence[str],
        geometry: Geometry,
        store: ParameterStore,
        dtype: torch.dtype,
        device: torch.device,
        reducer: Reducer,
        updates: UpdateHooks,
    ) -> None:
        self._model = model
        self._params = params
        self._names = names
        self._geometry = geometry
        self._device = device
        self._store = store
        self._dtype = dtype
        self._reducer = reducer
        self._updates = updates
        self._impls = self._contents()
        self._warned = False
        self.looked_s = 0.0  # seconds that looking for edits has taken
        self._find_owners()

    def _find_owners(self) -> None:
        """Note in which modules, by which names, the parameters are."""
        number = {id(as_given(param)): index for index, param in enumerate(self._params)}
        self._owners = [
            (module._parameters, key, param, number[id(param)])
            for module in self._model.modules()
            for key, param in module._parameters.items()
            if param is not None and id(param) in number
        ]

    def restore(self) -> None:
        """Adopt replaced parameters and replaced data. Local.

        Raises: RuntimeError naming a parameter that has another shape, dtype or device now.
        """
        start = time.perf_counter()
        self.put_back()
        for index in self._store.detached():
            self._adopt(index, self._params[index].data)
        self.looked_s += time.perf_counter() - start

    def put_back(self, in_forward: bool = False) -> None:
        """Put the optimizer's Parameter objects back if the program has replaced them. Local. Raises: as restore.

        in_forward: keep those that ``torch.func.functional_call`` has set for this forward.
        """
        for table, key, param, _ in self._owners:
            if table.get(key) is not param:
                if in_forward and _in_functional_call():
                    return
                self._updates.settle()
                self._replaced()
                break
        now = self._contents()
        if now != self._impls:  # torch.utils.swap_tensors: a Python object has another tensor's content
            for _ in self._store.detached():  # units take swapped values back first, or raise
                pass
            for index, impl in enumerate(now):
                if impl != self._impls[index] and self._params[index].requires_grad:  # otherwise it is compared again
                    self._reducer.hook_again(index)
                    self._impls[index] = impl

    def _contents(self) -> list[int]:
        """Return the tensors of the core of torch that the trained parameters' Python objects have."""
        with torch._C.DisableTorchFunctionSubclass():
            trained: Sequence[Any] = self._params[: self._geometry.trained_count]
            return [param._cdata for param in trained]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Attach parameters with replaced data inside, and restore the program's data afterwards.

        For calls that only read. Programs put other data into parameters for a while (averaged weights), and hold the
        store's own data in the meantime, which must not change.
        """
        self.put_back()
        lent = [(index, self._params[index].data, self._store.own_copy(index)) for index in self._store.detached()]
        self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                for index, value, before in lent:
                    self._store.adopt(index, before)
                    self._params[index].data = value

    def _replaced(self) -> None:
        """Put the optimizer's Parameters back if the program has replaced them, with the replacements' values."""
        here = [(index, table.get(key)) for table, key, _, index in self._owners]
        others = [(self._names[n], each) for n, each in here if each is not None and not fits(self._params[n], each)]
        found = second_owner(self._model.named_modules(), others)
        if found:
            raise RuntimeError(f"after ZeroOptimizer was built, {found}")
        present = {id(param) for param in self._model.parameters()}
        ours = {id(as_given(param)) for param in self._params}
        for table, key, param, index in self._owners:
            other = table.get(key)
            if other is None or other is param or id(param) in present or id(other) in ours:
                continue  # moved by a parametrization or pruning, taken out of the model, or tied to another one
            self._adopt(index, as_local(other).data)
            self._warn_once(index)
            table[key] = param
            if index < self._geometry.trained_count:
                self._reducer.take_over(index, other.grad)
        self._find_owners()

    def _adopt(self, index: int, value: torch.Tensor) -> None:
        self._check(index, value)
        with torch.no_grad():
            self._store.adopt(index, value)

    def _check(self, index: int, value: torch.Tensor) -> None:
        shape, before = self._geometry.places[index].shape, "before ZeroOptimizer is built"
        for what, now, built, remedy in (
            ("is", value.dtype, self._dtype, f"convert the model {before}, or choose its precision="),
            ("has shape", tuple(value.shape), tuple(shape), "close() it and build it again for the changed model"),
            ("is on", value.device, self._device, f"move the model {before}"),
        ):
            if now != built:
                found = f"parameter {self._names[index]} {what} {now} now"
                raise RuntimeError(f"{found}, but ZeroOptimizer was built for {built}: {remedy}")

    def _warn_once(self, index: int) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "the Parameter object %s was replaced after ZeroOptimizer was built; its values are taken over, and "
                "the old object is put back into the module",
                self._names[index],
            )


def _in_functional_call() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False
