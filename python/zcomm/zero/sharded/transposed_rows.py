"""TransposedRows: ``weight.t()`` of a weight that is gathered by rows, for ``x @ weight.t()``.

A product with it is F.linear, by rows (rows/ops.py). Other operations use the transpose of the gathered weight, as do
all operations without a path by rows. Like a view, it has the weight's values at the time of its use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from zcomm.zero.sharded.dispatch import METADATA, STRIDES

_plain: Any = torch._C.DisableTorchFunctionSubclass
_TURNS = frozenset(("t", "T", "mT"))
_SWAPS = frozenset(("transpose", "swapaxes", "swapdims"))
_PRODUCTS = frozenset(("matmul", "mm", "__matmul__"))


def is_transpose(name: str, args: Any, kwargs: Any) -> bool:
    """Return True if a function of this name turns a matrix, its first argument."""
    if name in _TURNS:
        return len(args) == 1 and not kwargs
    dims = args[1:]
    return name in _SWAPS and not kwargs and len(dims) == 2 and all(type(d) is int for d in dims) and _turns(*dims)


def _turns(first: int, second: int) -> bool:
    return -2 <= first < 2 and -2 <= second < 2 and first % 2 != second % 2


class TransposedRows(torch.Tensor):
    """The transpose of ``weight``. Its memory, of the true shape, reads NaN.

    whole: returns the transpose of the gathered value; writes to it reach the weight.
    """

    _weight: nn.Parameter
    _whole: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = func.__self__.__name__ if name in ("__get__", "__set__") and hasattr(func, "__self__") else name
        first = args[0] if args else None
        if isinstance(first, TransposedRows):
            if name == "requires_grad" and len(args) == 1:
                return first._weight.requires_grad
            if func in METADATA and len(args) == 1 and not kwargs:
                with _plain():
                    return func(*args)
            if name in STRIDES:
                return func(torch.empty(tuple(first.shape)[::-1], device="meta").t(), *args[1:], **kwargs)
            if is_transpose(name, args, kwargs):
                return first._weight
        if name in _PRODUCTS and not kwargs and len(args) == 2 and isinstance(args[1], TransposedRows):
            x, weight = args[0], args[1]._weight
            if type(x) in (torch.Tensor, nn.Parameter) and (name != "mm" or x.dim() == 2):
                return F.linear(x, weight)
        args, kwargs = with_values(args, kwargs)
        return func(*args, **kwargs)


def with_values(args: Any, kwargs: Any) -> Any:
    """Return arguments with the transposed values in the places of TransposedRows: for a function of another class."""
    wholes: dict[int, torch.Tensor] = {}

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, TransposedRows):
            return leaf
        if id(leaf) not in wholes:
            wholes[id(leaf)] = leaf._whole()
        return wholes[id(leaf)]

    return tree_map(whole, (args, kwargs))


def transposed(weight: nn.Parameter, placeholder: torch.Tensor, whole: Callable[[], torch.Tensor]) -> TransposedRows:
    """Make the transpose of a weight. placeholder: of its shape, without its values."""
    with _plain():
        made: TransposedRows = placeholder.t().as_subclass(TransposedRows)
        made._weight, made._whole = weight, whole
    return made
