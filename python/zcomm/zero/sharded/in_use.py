"""Parameters in use: ordinary ones, of a class that detects changes by the program outside autograd.

[Note: in use] While a module of a unit runs, its parameters are views of memory that is not written back, and that
another unit uses later. So a change must be detected, and no tensor that outlives the unit may pass for the weight:
- ``.data`` and ``.detach()`` return a ``ValueInUse``, which shares the version counter. ``make_stand_ins`` compares it.
- A ``ValueInUse`` of a unit that has lost its memory raises; a write between passes raises, too.
- Arrays of numpy are read-only, because no version counter counts writes to them.
- If the program has asked for a weight's address, its bytes are compared (``expose``). The comparison runs at the end
  of the use in host memory, and at the next step on a device (address_checks.py).
Thread rule: as UnitManager.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zcomm.comm.dynamo import skip
from zcomm.zero.sharded.dispatch import DISTRIBUTED, MEMORY, METADATA, writes
from zcomm.zero.sharded.transposed_rows import TransposedRows, with_values

_plain: Any = torch._C.DisableTorchFunctionSubclass
_tensor: Any = torch.Tensor
_GET_DATA, _SET_DATA = _tensor.data.__get__, _tensor.data.__set__
_GET_BASE = _tensor._base.__get__
_ADDRESSES = MEMORY | {_tensor.__dlpack__}
# Files of zcomm, and of torch's compiler with the code that it generates.
_NOT_OF_PROGRAM = (str(Path(__file__).parents[2]) + os.sep, str(Path(torch.__file__).parent / "_"))
_TAKEN = "this tensor is its .data or .detach() of a forward or backward that has ended"


class Owner(Protocol):
    """The methods of UnitWeights that parameters in use call."""

    def lease(self, param: nn.Parameter) -> Lease:
        """Return the right to the memory that the parameter currently has."""

    def has_memory(self, lease: Lease) -> bool:
        """Return True while the unit has the memory that it had when the lease was made."""

    def is_used(self, lease: Lease) -> bool:
        """Return True while a module of the unit runs."""

    def expose(self, lease: Lease) -> None:
        """Note that the program knows the parameter's address."""


@dataclass(frozen=True)
class Lease:
    """The right to a parameter's memory in ``slot``, for as long as ``unit`` has that."""

    owner: Owner
    name: str
    param: nn.Parameter
    unit: Any
    slot: object

    def check(self, writing: bool) -> None:
        """Raise RuntimeError if another unit has the memory, or if a write would be lost."""
        if not self.owner.has_memory(self):
            raise RuntimeError(
                f"{self.name}: {_TAKEN}, and the weight is sharded over the ranks again: keep a copy (.clone()), or "
                "take p.data again"
            )
        if writing and not self.owner.is_used(self):
            raise RuntimeError(f"{self.name}: {_TAKEN}: values written to it would be lost; take p.data again")


def class_in_use(own: Any, owner: Owner) -> type:
    """Make the class of parameters of class ``own`` while a module that has them runs."""

    def value(param: Any) -> torch.Tensor:
        seen: torch.Tensor = _tensor.detach(param)
        return _value_in_use(seen, owner.lease(param)) if _is_called_by_program() else seen

    def numpy(param: Any, *, force: bool = False) -> Any:
        if param.requires_grad and not force:
            return _tensor.numpy(param)  # raises
        return _value_in_use(_tensor.detach(param), owner.lease(param)).numpy(force=force)

    def exposing(name: str) -> Callable[..., Any]:
        def method(param: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_called_by_program():
                owner.expose(owner.lease(param))
            return getattr(own, name)(param, *args, **kwargs)

        skip(method.__code__)
        return method

    def deepcopy(param: Any, memo: dict[int, Any]) -> Any:
        made = own.__deepcopy__(param, memo)
        made.__class__ = own
        return made

    skip(value.__code__)
    skip(numpy.__code__)
    body = {
        "data": property(value, _SET_DATA),
        "detach": value,
        "numpy": numpy,
        "__deepcopy__": deepcopy,
        "__module__": own.__module__,
        **{function.__name__: exposing(function.__name__) for function in _ADDRESSES},
    }
    return type(own.__name__, (own,), body)


class ValueInUse(torch.Tensor):
    """The ``.data`` or ``.detach()`` of a parameter in use, or a view of it."""

    _zcomm_lease: Lease

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or func == _GET_BASE:
            with _plain():
                return func(*args, **kwargs)
        if TransposedRows in types:
            args, kwargs = with_values(args, kwargs)
        name = getattr(func, "__name__", "")
        written = _written(func, name, args, kwargs)
        leases = []
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, ValueInUse):
                leases.append(leaf._zcomm_lease)
                leases[-1].check(writing=any(leaf is other for other in written))
        if func in _ADDRESSES and _is_called_by_program():
            leases[0].owner.expose(leases[0])
        with _plain():
            result = (_tensor.detach if func == _GET_DATA else func)(*args, **kwargs)
            if written and getattr(func, "__module__", "") == DISTRIBUTED:  # backends write by address
                if result is not None and hasattr(result, "wait"):
                    result.wait()
                torch.autograd.graph.increment_version(written)
            return tree_map(lambda leaf: _wrapped(leaf, leases), result)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # as torch.Tensor does

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.clone())
        return copied

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.clone().__reduce_ex__(proto)

    def _zcomm_whole(self, why: str) -> torch.Tensor:
        """Return the tensor itself for zcomm's own calls (comm/tensors.py), which count their writes."""
        self._zcomm_lease.check(writing=True)
        return self


skip(ValueInUse.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]


def _is_called_by_program() -> bool:
    """Return False if zcomm, or torch's compiler, calls the caller of this function.

    A compiler runs graphs on plain tensors, makes fake tensors, and traces operations on them.
    """
    if torch.compiler.is_compiling() or sys._getframe(2).f_code.co_filename.startswith(_NOT_OF_PROGRAM):
        return False
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return fake is None and torch._guards.TracingContext.try_get() is None


def _written(func: Any, name: str, args: Any, kwargs: Any) -> list[ValueInUse]:
    """Return the values that ``func`` writes to."""
    if getattr(func, "__module__", "") == DISTRIBUTED:
        target = kwargs.get("gather_list", args[1:2]) if name == "gather" else args[:1]
        target = () if name in ("send", "isend") else target or kwargs.get("tensor")
    else:
        target = (kwargs.get("out"), args[:1] if writes(name) else ())
    return [leaf for leaf in tree_leaves(target) if isinstance(leaf, ValueInUse)]


def _wrapped(leaf: Any, leases: list[Lease]) -> Any:
    """Wrap a tensor in the memory of one of the leases as a ``ValueInUse``, and make an array read-only."""
    if hasattr(leaf, "flags") and hasattr(leaf, "setflags"):
        leaf.setflags(write=False)
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, ValueInUse) or leaf.layout is not torch.strided:
        return leaf
    if torch._C._functorch.is_functorch_wrapped_tensor(leaf) or leaf.is_meta:  # no storage
        return leaf
    storage = leaf.untyped_storage()._cdata
    shared = (lease for lease in leases if _tensor.untyped_storage(lease.param)._cdata == storage)
    return next((_value_in_use(leaf, lease) for lease in shared), leaf)


def _value_in_use(tensor: torch.Tensor, lease: Lease) -> ValueInUse:
    value = tensor.as_subclass(ValueInUse)
    value._zcomm_lease = lease
    return value
