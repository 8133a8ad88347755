"""GradStandIn: the tensor in ``p.grad`` of a parameter while the reducer keeps the gradient.

[Note: gradient stand-ins] A stand-in has the true shape, dtype and device, but no storage. Its value is the result of
``full_grad``: averaged over ranks and micro-steps, without the loss scale. Elementwise changes in place act on this
rank's part of the accumulators, without a collective. Norms are exact over all ranks, by one collective for all
parameters. A view is a stand-in that records the view operations, so a change of the view changes the gradient. Every
other operation gathers the whole gradient and returns an ordinary tensor, after one logged warning.
A change must be the same on every rank, as it must be under DDP.
A stand-in is valid until its gradient is forgotten (``zero_grad``); afterwards its use raises.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_any, tree_flatten, tree_map

_aten = torch.ops.aten
_View = tuple[Any, tuple[Any, ...], dict[str, Any], int | None]  # operation, its further arguments, index of the result

# f(a x) = a f(x): the scale of the accumulators does not matter, unless an operand is the gradient itself.
_HOMOGENEOUS = {"mul_", "div_", "neg_", "zero_"}
# Each element's new value follows from the elements of the operands at its place.
_ELEMENTWISE = _HOMOGENEOUS | {
    "abs_", "add_", "addcdiv_", "addcmul_", "atan_", "ceil_", "clamp_", "clamp_max_", "clamp_min_", "copy_", "exp_",
    "fill_", "floor_", "fmod_", "hardtanh_", "leaky_relu_", "lerp_", "log_", "masked_fill_", "nan_to_num_", "pow_",
    "reciprocal_", "relu_", "remainder_", "round_", "rsqrt_", "sgn_", "sigmoid_", "sign_", "sqrt_", "square_", "sub_",
    "tanh_", "threshold_", "trunc_",
}  # fmt: skip
_LIKE = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "rand_like", "randint_like", "randn_like", "zeros_like",
}  # fmt: skip
_KEEPS_NORM = {"alias", "detach", "permute", "squeeze", "t", "transpose", "unsqueeze", "view", "_unsafe_view"}


class GradAccess(Protocol):
    """The values of all gradients of an optimizer, by number (gradients/values.py).

    generation: incremented when gradients are forgotten. warning: log level of the one record that ``warned`` marks.
    """

    names: Sequence[str]
    generation: int
    closed: bool
    warned: bool
    warning: int

    def shape_of(self, index: int) -> torch.Size: ...

    def whole(self, index: int) -> torch.Tensor:
        """Return the whole gradient, fp32, on the CPU; not to be changed. Collective."""

    def norm(self, index: int, ord: float) -> torch.Tensor:
        """Return the norm, a float64 scalar on the CPU. Collective."""

    def edit(self, index: int, change: Callable[[torch.Tensor, slice], None], homogeneous: bool = False) -> None:
        """``change(part, elements)`` changes flat parts of this rank's elements in place."""


class GradStandIn(torch.Tensor):
    """A stand-in for one gradient.

    values: the values of all gradients of the optimizer. index: the parameter's number in ``values``.
    """

    _owner: weakref.ref[GradAccess]
    _index: int
    _generation: int
    _of: GradStandIn | None  # the stand-in that this one is a view of
    _views: tuple[_View, ...]

    @staticmethod
    def __new__(
        cls,
        values: weakref.ref[GradAccess],
        index: int,
        generation: int,
        shape: torch.Size,
        strides: tuple[int, ...] | None,
        dtype: torch.dtype,
        device: torch.device,
        of: GradStandIn | None = None,
        views: tuple[_View, ...] = (),
    ) -> GradStandIn:
        made: GradStandIn = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        made._owner, made._index, made._generation, made._of, made._views = values, index, generation, of, views
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # --- helpers of its methods ------------------------------------------------------------------------------

    def _live(self) -> GradAccess:
        """Return the values. Raises: RuntimeError if its gradient has been forgotten, or its optimizer closed."""
        values = self._owner()
        generation = self._generation if self._of is None else self._of._generation
        if values is None or values.closed:
            raise RuntimeError("this gradient's ZeroOptimizer is closed")
        if generation != values.generation:
            raise RuntimeError(
                f"this gradient of {values.names[self._index]} has been forgotten by zero_grad(); keep a copy "
                "(p.grad.clone(), or zcomm.zero.full_grad(p)) to use it later"
            )
        return values

    def is_for(self, values: GradAccess, index: int) -> bool:
        """Return True if this stands for the whole gradient of that parameter. Raises: RuntimeError as ``_live``."""
        if self._owner() is not values or self._index != index:
            return False
        if self._of is not None and any(view[0] not in _SAME for view in self._views):
            return False
        self._live()
        return True

    def _is_same(self, other: GradStandIn) -> bool:
        """Return True if ``other`` is known to be the same view of the same gradient."""
        if self._owner() is not other._owner() or self._index != other._index:
            return False
        plain = all(not isinstance(each, torch.Tensor) for each in tree_flatten((self._views, other._views))[0])
        return plain and self._views == other._views

    def _zcomm_gradient(self) -> str:
        return self._live().names[self._index]

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copy the values, as ``copy_`` does."""
        if value.shape != self.shape:
            raise RuntimeError(
                f"p.grad of {self._live().names[self._index]} has shape {tuple(self.shape)}: its data cannot become a "
                f"tensor of shape {tuple(value.shape)}"
            )
        with torch.no_grad():
            self.copy_(value)

    def full_tensor(self) -> torch.Tensor:
        """Return the gradient as an ordinary tensor, a copy. Collective."""
        values = self._live()
        return self._viewed(values.whole(self._index)).to(self.dtype).to(self.device).clone()

    def _viewed(self, whole: torch.Tensor) -> torch.Tensor:
        for func, args, kwargs, which in self._views:
            result = func(whole, *args, **kwargs)
            whole = result if which is None else result[which]
        return whole

    def _gathered(self, by: str) -> torch.Tensor:
        """Gather as ``full_tensor``, because of operation ``by``; the caller must not change the result."""
        values = self._live()
        if not values.warned:
            values.warned = True
            logging.getLogger("zcomm").log(
                values.warning,
                "%s of p.grad gathers the whole gradient of %s, a collective operation that all ranks must call; "
                "zcomm.zero.full_grad(p) does so explicitly (logged once)", by, values.names[self._index],
            )  # fmt: skip
        return self._viewed(values.whole(self._index)).to(self.dtype).to(self.device)

    # --- methods without dispatch ----------------------------------------------------------------------------

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        values = self._owner()
        name = "a parameter" if values is None or values.closed else values.names[self._index]
        return (
            f"<gradient of {name}, shape {tuple(self.shape)}, {self.dtype}, sharded by ZeroOptimizer; "
            "zcomm.zero.full_grad(p) gives its values>"
        )

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)  # as torch.Tensor does

    def numpy(self, *, force: bool = False) -> Any:
        return self._gathered("numpy()").detach().clone().numpy(force=force)

    def __array__(self, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return self._gathered("numpy()").detach().clone().__array__(dtype)

    def tolist(self) -> Any:
        return self._gathered("tolist()").tolist()

    def apply_(self, callable: Any) -> GradStandIn:
        whole = self._gathered("apply_()").clone()
        whole.apply_(callable)
        with torch.no_grad():
            _write(self, whole)
        return self

    def map2_(self, *_: Any) -> GradStandIn:
        raise _no_storage("map2_()")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self._gathered("deepcopy()").clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("p.grad is sharded by ZeroOptimizer and cannot be pickled: use zcomm.zero.full_grad(p)")

    def data_ptr(self) -> int:
        raise _no_storage("data_ptr()")

    def untyped_storage(self) -> torch.UntypedStorage:
        raise _no_storage("untyped_storage()")

    def storage(self) -> Any:
        raise _no_storage("storage()")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise _no_storage("dlpack")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            raise RuntimeError(
                f"{func} of p.grad: ZeroOptimizer has averaged the gradient over the ranks already; leave such calls "
                "out. zcomm.zero.full_grad(p) gives the whole gradient as an ordinary tensor"
            )
        name = func._schema.name.partition("::")[2]
        if name.startswith("_foreach_") and name.endswith("_"):
            return _foreach(name, func, args, kwargs)
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if name == "_foreach_norm":
            return [_norm(each, *args[1:], **kwargs) for each in args[0]]
        first = args[0] if args and isinstance(args[0], GradStandIn) else None
        if first is not None:
            if name in _LIKE:
                made = torch.empty((), dtype=first.dtype, device=first.device).expand(first.shape)
                return func(made, *args[1:], **kwargs)
            if name == "linalg_vector_norm" and first._norm_is_whole(*args[1:], **kwargs):
                return _norm(first, *args[1:], **kwargs)
            if name == "norm" and len(args) <= 2 and not kwargs:
                return _norm(first, 2 if len(args) < 2 else args[1])
            if func in _REINTERPRETS:
                raise RuntimeError(f"{name} of p.grad: use zcomm.zero.full_grad(p), which is an ordinary tensor")
            if _is_view(func):
                return _take_view(func, first, args[1:], kwargs)
            if name == "copy_" and isinstance(args[1], GradStandIn) and first._is_same(args[1]):
                return first  # the end of ``p.grad[i] *= 2``
            if name in _ELEMENTWISE and func._schema.arguments[0].alias_info is not None:
                _change(name, func, first, args[1:], kwargs)
                return first
        return _by_gathering(func, name, args, kwargs)

    def _norm_is_whole(self, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> bool:
        every = dim is None or sorted(d % max(self.dim(), 1) for d in dim) == list(range(self.dim()))
        same = self._of is None or self.numel() == self._of.numel()
        return every and not keepdim and same and all(_name(view[0]) in _KEEPS_NORM for view in self._views)


_REINTERPRETS = (_aten.view.dtype, _aten.as_strided.default)
_SAME = (_aten.detach.default, _aten.alias.default)


def _no_storage(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: p.grad has no memory of its own, ZeroOptimizer keeps the gradient in shards; use full_grad(p)"
    )


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]


def _is_view(func: Any) -> bool:
    schema = func._schema
    info = schema.arguments[0].alias_info if schema.arguments else None
    return info is not None and not info.is_write and len(schema.returns) == 1


def _take_view(func: Any, base: GradStandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    root = base if base._of is None else base._of
    like = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype, device="meta")
    result = like if func in _SAME else func(like, *args, **kwargs)

    def made(value: torch.Tensor, which: int | None) -> GradStandIn:
        views = (*base._views, (func, args, kwargs, which))
        form = (value.shape, value.stride(), value.dtype, base.device)
        return GradStandIn(base._owner, base._index, base._generation, *form, root, views)

    if isinstance(result, torch.Tensor):
        return made(result, None)
    return [made(value, which) for which, value in enumerate(result)]


def _norm(of: torch.Tensor, ord: Any = 2, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
    """Compute an element of ``_foreach_norm`` or a whole norm."""
    if _ and isinstance(_[-1], torch.dtype):
        dtype = _[-1]
    if not isinstance(of, GradStandIn):
        plain: torch.Tensor = torch.linalg.vector_norm(of, ord, dtype=dtype)
        return plain
    values = of._live()
    if any(_name(view[0]) not in _KEEPS_NORM for view in of._views):
        gathered: torch.Tensor = torch.linalg.vector_norm(of._gathered("norm()"), ord, dtype=dtype)
        return gathered
    return values.norm(of._index, float(ord)).to(dtype or of.dtype).to(of.device)


def _foreach(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a function ``torch._foreach_<operation>_`` tensor by tensor."""
    what = name.removeprefix("_foreach_")
    one = getattr(_aten, {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}.get(what, what))
    named = [argument.name for argument in func._schema.arguments]
    for number, target in enumerate(args[0]):
        rest: list[Any] = []
        more = dict(kwargs)
        for key, value in zip(named[1:], args[1:], strict=False):
            own = value[number] if isinstance(value, (list, tuple)) else value
            if what.startswith("addc") and key in ("value", "scalars"):
                more["value"] = value[number].item() if isinstance(value, torch.Tensor) else own
            elif key == "alpha":
                more[key] = own
            else:
                rest.append(own)
        one(target, *rest, **more)


def _unscale(grads: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale as torch.amp.GradScaler does. All ranks find a value that is not finite on one of them."""
    for grad in grads:
        if isinstance(grad, GradStandIn):
            finite = torch.isfinite(_norm(grad, float("inf")))
            found_inf.masked_fill_(~finite.to(found_inf.device), 1.0)
            grad.mul_(inv_scale)
        else:
            _aten._amp_foreach_non_finite_check_and_unscale_([grad], found_inf, inv_scale)


def _change(name: str, func: Any, target: GradStandIn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Apply an elementwise operation in place to this rank's part."""
    values, shape = target._live(), target.shape
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    own = any(isinstance(each, GradStandIn) for each in tensors)
    operands = {id(each): _operand(each, name) for each in tensors}
    for each in operands.values():
        torch.broadcast_shapes(each.shape, shape)
        if each.dim() > 0 and torch.broadcast_shapes(each.shape, shape) != shape:
            raise RuntimeError(f"{name}: shape {list(each.shape)} does not fit p.grad, which has {list(shape)}")
    views = tuple(view for view in target._views if view[0] not in _SAME)

    def change(part: torch.Tensor, flat: slice) -> None:
        if not views:
            picked: slice | torch.Tensor = flat
            inside = part
        else:
            numel = values.shape_of(target._index).numel()
            places = target._viewed(torch.arange(numel).view(values.shape_of(target._index))).reshape(-1)
            picked = (places >= flat.start) & (places < flat.stop)
            at = (places[picked] - flat.start).to(part.device)
            inside = part[at]

        def mine(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            operand = operands[id(each)]
            if operand.dim() == 0:
                return operand.to(part.device)
            whole = operand.broadcast_to(shape).reshape(-1)
            return whole[picked if isinstance(picked, slice) else picked.to(whole.device)].to(part.device)

        func(inside, *tree_map(mine, args), **tree_map(mine, kwargs))
        if views:
            part[at] = inside

    values.edit(target._index, change, name in _HOMOGENEOUS and not own and "rounding_mode" not in kwargs)


def _operand(each: torch.Tensor, by: str) -> torch.Tensor:
    return each._gathered(by) if isinstance(each, GradStandIn) else each.detach()


def _by_gathering(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on whole gradients, and copy its writes to stand-ins into this rank's part."""
    written: dict[int, GradStandIn] = {}
    for position, argument in enumerate(func._schema.arguments):
        value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written |= {id(each): each for each in tree_flatten(value)[0] if isinstance(each, GradStandIn)}
    wholes: dict[int, torch.Tensor] = {}

    def whole(each: Any) -> Any:
        if not isinstance(each, GradStandIn):
            return each
        if id(each) not in wholes:
            gathered = each._gathered(name)
            wholes[id(each)] = gathered.clone() if id(each) in written else gathered
        return wholes[id(each)]

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    for key, stand_in in written.items():
        _write(stand_in, wholes[key])
    back = {id(wholes[key]): stand_in for key, stand_in in written.items()}
    kept = {id(value) for value in wholes.values()}
    if tree_any(lambda each: id(each) in kept, result):
        result = tree_map(lambda each: back.get(id(each), each.clone() if id(each) in kept else each), result)
    return result


def _write(stand_in: GradStandIn, new: torch.Tensor) -> None:
    """Set ``stand_in`` to ``new``, but only elements that differ in the parameter's dtype."""
    if new.shape != stand_in.shape:
        raise RuntimeError(f"p.grad has shape {list(stand_in.shape)}; it cannot become {list(new.shape)}")
    changed = (new != stand_in._gathered("copy_")).reshape(-1)
    if bool(changed.any()):
        stand_in.masked_fill_(changed.view(stand_in.shape), 0.0)
        stand_in.add_(torch.where(changed, new.reshape(-1), 0.0).view(stand_in.shape))
