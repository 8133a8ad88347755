"""OwnView: ``p.view_as(p)`` and ``p.expand_as(p)`` of a stand-in. Programs find a parameter's node of backward by them.

``torch.autograd.graph.register_multi_grad_hook``, ``get_gradient_edge`` and wrappers as DDP ask such a view for its
``grad_fn``, and that for the node which accumulates the gradient. This one has the true node, and communicates nothing:
one rank may ask alone. Any other operation has the gathered value, which is collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from zcomm.zero.units.stand_in_ops import METADATA, STRIDES

_plain: Any = torch._C.DisableTorchFunctionSubclass
_tensor: Any = torch.Tensor
_OF_NODE = {_tensor.grad_fn.__get__: "grad_fn", _tensor._grad_fn.__get__: "grad_fn"}
_OF_NODE |= {getattr(_tensor, name).__get__: name for name in ("requires_grad", "is_leaf", "output_nr")}


class OwnView(torch.Tensor):
    """A parameter in its own shape. Its memory reads NaN.

    whole: returns the view of the gathered value.
    """

    _view: torch.Tensor
    _whole: Callable[[], torch.Tensor]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, OwnView) and len(args) == 1 and not kwargs:
            with _plain():
                if func in _OF_NODE:
                    return getattr(first._view, _OF_NODE[func])
                if func in METADATA:
                    return func(first)
                if getattr(func, "__name__", "") in STRIDES:
                    return func(torch.empty(first.shape, device="meta"))
        wholes: dict[int, torch.Tensor] = {}

        def whole(leaf: Any) -> Any:
            if not isinstance(leaf, OwnView):
                return leaf
            if id(leaf) not in wholes:
                wholes[id(leaf)] = leaf._whole()
            return wholes[id(leaf)]

        args, kwargs = tree_map(whole, (args, kwargs))
        return func(*args, **kwargs)


def own_view(weight: nn.Parameter, hollow: torch.Tensor, whole: Callable[[], torch.Tensor]) -> OwnView:
    """Make the view of a parameter in its own shape. hollow: of its shape, without its values."""
    with _plain():
        made: OwnView = hollow.as_subclass(OwnView)
        made._view, made._whole = weight.view_as(weight), whole
    return made
