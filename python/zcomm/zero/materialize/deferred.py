"""Deferred tensors: parameters on the meta device with recipes of their values ([Note: recipes]).

``value_of`` repeats a recipe's operations: the same bits at any time, on any rank. ``reader_of`` does so by pieces.
Source: the idea is torchdistX's deferred_init.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from zcomm.comm.communicator import Communicator
from zcomm.zero.materialize import mapped_file
from zcomm.zero.materialize.recipe import Deferred, Recipe, Ref, ValuePart, by_pieces
from zcomm.zero.sharded.dispatch import AUTOGRAD, LIKE

_ATTRIBUTE, _OPENED = "_zcomm_deferred", "_zcomm_opened"
_tensor: Any = torch.Tensor
_data: Any = torch.Tensor.data
_GET_DATA, SET_DATA = _data.__get__, _data.__set__
_GET_DEVICE = torch.Tensor.device.__get__
_is_meta: Any = torch.Tensor.is_meta
_GET_IS_META = _is_meta.__get__


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


# Attributes and methods that do not read a parameter's value.
_OF_NO_VALUE = {
    *(_getter(name) for name in "shape dtype grad grad_fn is_leaf layout ndim requires_grad _version".split()),
    *(getattr(torch.Tensor, name) for name in "size dim numel is_floating_point is_complex element_size".split()),
    torch.Tensor.__hash__,
    torch.is_floating_point,
}
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_NEEDS_VALUE = {torch.Tensor.data_ptr, torch.Tensor.share_memory_, *AUTOGRAD}
_OF_META = re.compile(r"(?i)(?<![a-z])meta(?!data)")  # in torch's errors of the meta device
_AS_ANOTHER = {"to", "type_as"}  # of a tensor with values: converts to dtype and device of the other tensor
_BY_SHAPE = {"view_as", "expand_as", "reshape_as", "__set__"}


class _NoValue(torch.Tensor):
    """Base of Waiting and WaitingData, with errors for uses that need the value. Each error names the remedy."""

    __slots__ = ()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override,unused-ignore]
        if _OPENED in vars(self):
            return str(_tensor.__repr__(self))
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}: of zcomm.zero.Init(), without "
            "memory before ZeroOptimizer is built; zcomm.zero.GatheredParameters shows its value)"
        )

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        if _OPENED in vars(self):
            return str(_tensor.__format__(self, spec))
        raise _no_value(self)

    def __reduce_ex__(self, proto: Any) -> Any:
        if _OPENED not in vars(self):
            raise _no_value(self)
        vars(self).pop(_OPENED)()
        return self.__reduce_ex__(proto)  # of its class now

    def _zcomm_whole(self, why: str) -> torch.Tensor:
        """Return the value for zcomm's own calls (comm/tensors.py)."""
        if _OPENED not in vars(self):
            raise _no_value(self)
        vars(self).pop(_OPENED)()
        return self


class Waiting(_NoValue, nn.Parameter):
    """A parameter on the meta device that reports the CPU, because programs put inputs and adapters on its device.

    Writes to its ``.data`` increment its version counter, unlike in torch, because they would be lost unnoticed. A
    parameter of a program's own class has a class that derives from both.
    """

    __slots__ = ()
    becomes: type[nn.Parameter] = nn.Parameter

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.becomes(*args, **kwargs)  # type(param)(value): a parameter with that value

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if _OPENED in vars(self):
            vars(self).pop(_OPENED)()
            return copy.deepcopy(self, memo)
        found = check(self, f"a parameter of shape {tuple(self.shape)}")
        memory = torch.empty(found.ref.size, dtype=self.dtype, device="meta")
        copied: Any = torch.Tensor._make_subclass(self.becomes, memory, self.requires_grad)
        make_wait(copied, dataclasses.replace(found, version=copied._version))
        return memo.setdefault(id(self), copied)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            opened = _opened(func, args, kwargs or {})
            if opened and func == _GET_IS_META:
                return False
            if opened and func == torch.Tensor.copy_ and _copied_from_file(args, kwargs or {}):
                return args[0]
        if opened and func != _GET_DEVICE:
            for param in opened:
                vars(param).pop(_OPENED)()  # real from here on
            return func(*args, **(kwargs or {}))
        own: Any = super().__torch_function__
        of_program = None if own is torch._C._disabled_torch_function_impl else own
        return _without_values(func, types, args, kwargs or {}, of_program)


class WaitingData(_NoValue, torch.Tensor):
    """The result of an operation on a Waiting: ``.data``, ``.detach()``, a view, or a result without a value.

    It is on the meta device, and reports the CPU. A write to a view of a Waiting increments the Waiting's version.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise _no_value(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Waiting) for kind in types):
            return Waiting.__torch_function__(func, types, args, kwargs)
        return _without_values(func, types, args, kwargs or {}, None)


def _without_values(func: Any, types: Any, args: Any, kwargs: dict[str, Any], of_program: Any) -> Any:
    """Run ``func`` on tensors without values. of_program: ``__torch_function__`` of a program's class, or None.

    Raises: RuntimeError if a value is needed.
    """
    name = getattr(func, "__name__", "")
    with torch._C.DisableTorchFunctionSubclass():
        first: Any = args[0] if args else None
        if func == _GET_DEVICE:
            return torch.device("cpu")
        if func == _GET_DATA:
            return first.detach().as_subclass(WaitingData)  # as .data, but with the parameter's version counter
        if func == SET_DATA:
            _check_data(*args)
        if func in _MOVES and isinstance(first, _NoValue):
            return _wrapped(_converted(first, func, args[1:], kwargs), args)
        if func in _NEEDS_VALUE or (func == torch.Tensor.requires_grad_ and isinstance(first, WaitingData)):
            raise _no_value(*tree_leaves((args, kwargs)))
        if name in LIKE and isinstance(first, _NoValue):
            kwargs = {"device": "cpu", **kwargs}  # the device of a parameter with memory
            if not name.endswith("_like"):
                args = (torch.empty(0, dtype=first.dtype, device="cpu"), *args[1:])
        elif name in _AS_ANOTHER and not isinstance(first, _NoValue):
            args = (first, *(_place_of(leaf) for leaf in args[1:]))
            kwargs = {key: _place_of(leaf) for key, leaf in kwargs.items()}
    try:
        if of_program is not None:
            result = of_program(func, types, args, kwargs)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
    except Exception as error:
        if not _OF_META.search(str(error)):
            raise
        raise _no_value(*tree_leaves((args, kwargs))) from error
    with torch._C.DisableTorchFunctionSubclass():
        return _wrapped(_checked(result, name, args, kwargs), args)


def _no_value(*leaves: Any) -> RuntimeError:
    tensor = next(leaf for leaf in leaves if isinstance(leaf, _NoValue))
    with torch._C.DisableTorchFunctionSubclass():
        shape = tuple(tensor.shape)
    what = "a parameter" if isinstance(tensor, Waiting) else "a view, or a function, of a parameter"
    return RuntimeError(
        f"{what} of shape {shape} of zcomm.zero.Init() has no value here before ZeroOptimizer is built: use the model "
        "after that, or inside of zcomm.zero.GatheredParameters"
    )


def _check_data(target: torch.Tensor, value: torch.Tensor) -> None:
    """Check ``target.data = value``."""
    if not isinstance(target, _NoValue):
        raise _no_value(value)
    if value is not target and value.dtype == target.dtype:  # model.to() may
        raise ValueError(
            f"a parameter of shape {tuple(target.shape)} is given other .data after zcomm.zero.Init() had ended, but "
            "it has no memory then: initialise it inside, or inside of zcomm.zero.GatheredParameters"
        )


def _place_of(leaf: Any) -> Any:
    """Return an empty tensor with the dtype and future device of a ``leaf`` without a value; any other ``leaf``."""
    return torch.empty(0, dtype=leaf.dtype, device="cpu") if isinstance(leaf, _NoValue) else leaf


def _wrapped(result: Any, args: Any) -> Any:
    """Return ``result`` with new tensors on the meta device as WaitingData."""

    def is_new(leaf: Any) -> bool:
        return type(leaf) is torch.Tensor and leaf.is_meta and all(leaf is not each for each in args)

    if not any(map(is_new, tree_leaves(result))):
        return result  # torch.Size is a tuple, too
    return tree_map(lambda leaf: leaf.as_subclass(WaitingData) if is_new(leaf) else leaf, result)


def open_late(param: nn.Parameter, make_real: Callable[[], None]) -> None:
    """Let a waiting parameter call ``make_real`` on the first use of its value. Until then a copy from a tensor of a
    mapped file only becomes its future value, without a read."""
    setattr(param, _OPENED, make_real)


def close(param: nn.Parameter) -> None:
    """Undo ``open_late``."""
    vars(param).pop(_OPENED, None)


def future(param: nn.Parameter) -> Deferred:
    """Return the future value of a waiting parameter."""
    found: Deferred = getattr(param, _ATTRIBUTE)
    return found


def set_future(param: nn.Parameter, value: Deferred) -> None:
    """Set another future value, of the same shape, of a waiting parameter."""
    setattr(param, _ATTRIBUTE, dataclasses.replace(value, version=param._version))


def _opened(func: Any, args: Any, kwargs: Any) -> list[Waiting]:
    """Return the parameters that ``func`` makes real."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Waiting) and _OPENED in vars(leaf)]
    return [] if func in _OF_NO_VALUE else leaves


def _copied_from_file(args: Any, kwargs: Any) -> bool:
    """Make the second argument the first one's future value; return False unless it has equal shape and is in a mapped
    file."""
    if len(args) != 2 or kwargs or isinstance(args[1], Waiting) or args[0].shape != args[1].shape:
        return False
    param, place = args[0], mapped_file.file_range(args[1])
    if place is None or not (param.is_floating_point() and place.dtype.is_floating_point):
        return False
    if param.requires_grad and torch.is_grad_enabled():
        return False  # torch's error
    dtype = param.dtype
    make_wait(param, Deferred(Recipe(0), Ref.to(param), param._version, lambda a, b: place.read(a, b).to(dtype)))
    return True


def _converted(tensor: Any, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Convert only the dtype, for ``model.to(device)``, because ZeroOptimizer places the parameters."""
    if func is not torch.Tensor.to:
        return cast(torch.Tensor, tensor)
    if args and isinstance(args[0], torch.Tensor):
        args = (args[0].dtype, *args[1:])
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return cast(torch.Tensor, tensor.to(*args, **kwargs))
    return cast(torch.Tensor, tensor if dtype in (None, tensor.dtype) else tensor.to(dtype))


def _checked(result: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return ``result``. Raises: RuntimeError if it was computed from tensors with and without values.

    torch would return uninitialised memory (``F.linear`` with a weight on the meta device), or a result on the meta
    device (``F.embedding``).
    """
    leaves = tree_leaves((args, kwargs))
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if name in _BY_SHAPE or not any(isinstance(leaf, _NoValue) for leaf in leaves):
        return result
    computed = any(_has_values(leaf) or all(leaf is not each for each in leaves) for leaf in made)
    if computed and any(_has_values(leaf) for leaf in leaves):
        raise _no_value(*leaves)
    return result


def _has_values(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not leaf.is_meta


@functools.cache
def _waiting(kind: type[nn.Parameter]) -> type[Waiting]:
    """Return the class of ``kind`` while it waits."""
    if kind is nn.Parameter:
        return Waiting
    return type(f"Waiting{kind.__name__}", (Waiting, kind), {"__slots__": (), "becomes": kind})


def make_wait(param: torch.Tensor, deferred: Deferred) -> None:
    """Let ``param``, on the meta device, become the value ``deferred``."""
    setattr(param, _ATTRIBUTE, deferred)
    kind = type(param)
    if issubclass(kind, nn.Parameter) and not issubclass(kind, Waiting):
        param.__class__ = _waiting(kind)


def mark_real(param: torch.Tensor) -> None:
    """Mark ``param``, which has memory, as a parameter of ``zero.Init`` until ZeroOptimizer takes it."""
    setattr(param, _ATTRIBUTE, None)


def is_marked_real(param: torch.Tensor) -> bool:
    """Return True for a parameter of ``mark_real``."""
    return not isinstance(param, Waiting) and vars(param).get(_ATTRIBUTE, param) is None


def forget_mark(param: torch.Tensor) -> None:
    """Undo ``mark_real``."""
    if is_marked_real(param):
        delattr(param, _ATTRIBUTE)


def read_from(param: torch.Tensor, read: Callable[[int, int], torch.Tensor]) -> None:
    """Set the future value of ``param``, on the meta device: ``read(begin, end)`` returns its flat elements."""
    make_wait(param, Deferred(Recipe(0), Ref.to(param), param._version, read))


def value_of(param: torch.Tensor, name: str, comm: Communicator | None) -> torch.Tensor:
    """Return the whole value of a deferred parameter, in its shape; a real ``param`` itself. If ranks have parts of it,
    the call is collective over ``comm``; otherwise ``comm`` is unused.

    Raises: ValueError for a parameter that was changed after ``zero.Init`` had ended (there was no memory to change).
    """
    if not param.is_meta:
        return param
    deferred = check(param, name)
    with torch.no_grad():
        if deferred.part is not None:
            assert comm is not None
            return deferred.part.gather(comm, name).to(param.dtype)
        if deferred.read is not None:
            return deferred.read(0, param.numel()).view(param.shape)
        return deferred.ref.on(deferred.recipe.replay()).to(param.dtype)  # a model.to(dtype) since then


def reader_of(param: torch.Tensor, name: str) -> Callable[[int, int], torch.Tensor]:
    """Return ``read(begin, end)`` of a parameter's flat elements, from front to back. A value that can be computed by
    pieces never exists whole. A value in parts of the ranks needs ``value_of``. Raises: as ``value_of``."""
    deferred = check(param, name) if param.is_meta else None
    if deferred is not None and deferred.read is not None:
        return deferred.read
    cut = None if deferred is None else by_pieces(deferred)
    if cut is not None:
        return cut.read
    mapped = mapped_file.reader_of(param) if deferred is None else None
    if mapped is not None:
        return mapped
    flat: list[torch.Tensor] = []

    def read(begin: int, end: int) -> torch.Tensor:
        if not flat:
            whole = param.detach() if deferred is None else value_of(param, name, None)
            flat.append(whole.reshape(-1))
        return flat[0][begin:end]

    return read


def check(param: torch.Tensor, name: str) -> Deferred:
    """Return the deferred value. Raises: ValueError if there is none, or if the parameter was changed since."""
    deferred: Deferred | None = getattr(param, _ATTRIBUTE, None) if param.is_meta else None
    if deferred is None:
        raise ValueError(
            f"{name} is on the meta device and has no value to come: build the model inside of zcomm.zero.Init(), or "
            "call zcomm.zero.Init(model) or zcomm.zero.load_weights(model, path)"
        )
    if param._version != deferred.version or param.shape != deferred.ref.size:
        raise ValueError(
            f"{name} was changed after zcomm.zero.Init() had ended, but it has no memory then: initialise it inside, "
            "or inside of zcomm.zero.GatheredParameters"
        )
    return deferred


def materialize(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make a parameter on the meta device an ordinary one with the data ``value``.

    It remains the same object, with its class, attributes, hooks and ``requires_grad``.
    Raises: RuntimeError if another object refers to its memory or, weakly, to it, because torch cannot swap it then.
    """
    for name in (_ATTRIBUTE, _OPENED):
        vars(param).pop(name, None)
    if not param.is_meta:
        param.data = value
        return
    kind = type(param)
    if issubclass(kind, Waiting):
        kind = param.__class__ = kind.becomes
    swap_memory(param, value, kind)


def wait_again(param: nn.Parameter, kept: Deferred, dtype: torch.dtype) -> None:
    """Undo ``materialize``: ``param``, in ``dtype``, has no memory again, and ``kept`` is its future value."""
    memory = torch.empty(kept.ref.size, dtype=dtype, device="meta")
    swap_memory(param, memory, type(param))
    make_wait(param, Deferred(kept.recipe, kept.ref, param._version, kept.read, kept.part))


def wait_for_part(param: nn.Parameter, part: ValuePart) -> None:
    """Free the memory of ``param``: from now on its value is ``part`` together with the other ranks' parts."""
    wait_again(param, Deferred(Recipe(0), Ref.to(param), 0, part=part), param.dtype)


def swap_memory(param: nn.Parameter, value: torch.Tensor, kind: type[nn.Parameter]) -> None:
    """Replace memory and device of ``param`` by those of ``value``. torch also swaps all Python attributes of a tensor
    except its hooks, so they are copied to the other tensor first."""
    other: Any = torch.Tensor._make_subclass(kind, value.detach(), param.requires_grad)
    vars(other).update(vars(param))
    for slot in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(param, slot):
            setattr(other, slot, getattr(param, slot))
    if weakref.getweakrefs(param):
        raise RuntimeError(
            f"a parameter of shape {tuple(param.shape)} of zcomm.zero.Init() becomes real, and torch cannot swap its "
            "memory while there are weak references to it: make those after ZeroOptimizer"
        )
    torch.utils.swap_tensors(param, other)
    of_program: Any = param
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(param, hooks):
            setattr(of_program, hooks, getattr(param, hooks))  # registers them with the new memory
