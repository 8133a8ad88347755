"""Hooks on saved tensors: they gather a unit for backward, by whichever path backward enters it.

[Note: guarded views] A unit is gathered for backward when a gradient reaches its module's outputs. Backward may enter
it otherwise:
- by an activation that a hook or an attribute took out of the module
- by outputs that this code cannot look into
- by the graph of a backward pass (create_graph=True).
A view that is used then would read addresses without memory, or, on a device, another unit's weights. So hooks on saved
tensors surround a unit's forward. They store its views with their slot, and gather the unit when backward needs a view.
With create_graph the nodes of backward save such views, too. Autograd resets the thread's hooks after each node, so
hooks pushed when a node asks for a view last until that node ends.
Tensors outside the unit's memory go to the hooks around the unit (checkpoints, offload_activations). Without such hooks
their version is stored and compared, as autograd does.
If no unit ever loses its memory to another, no guard is needed. Cost: 1 to 4 us for each saved tensor.
Thread rule: on the thread that runs forward, or the node of backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_Need = Callable[[object], None]
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_autograd: Any = torch._C._autograd
_top: Callable[[bool], Hooks | None] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
# Bound to names here, because torch.compile would trace functions that name modules of torch.
_push = _autograd._push_saved_tensors_default_hooks
_pop = _autograd._pop_saved_tensors_default_hooks
_enabled = _autograd._saved_tensors_hooks_is_enabled


def possible() -> bool:
    """Return True from torch 2.8 on; earlier versions cannot return the hooks around a unit."""
    return _top is not None


class _View:
    """A saved view of a unit's memory, addresses ``span`` in ``slot``. need(slot): called before the view is used.
    ``version`` is the weight's, which a step increments."""

    __slots__ = ("need", "slot", "span", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, span: tuple[int, int], slot: object, need: _Need) -> None:
        self.tensor, self.span, self.slot, self.need = tensor, span, slot, need
        self.version = tensor._version


def push(span: tuple[int, int], slot: object, need: _Need) -> Hooks | None:
    """Guard tensors that autograd saves from now on at the addresses ``span``, [begin, end), of the unit in ``slot``.

    Returns the argument for ``pop``; None if hooks are disabled (torch.func), so that nothing is guarded.
    """
    if _top is None or not _enabled():
        return None
    outer, (begin, end) = _top(True), span

    def pack(tensor: torch.Tensor) -> Any:
        try:
            at = tensor.data_ptr()
        except RuntimeError:  # a kind of tensor without an address
            at = 0
        if begin <= at < end:
            return _View(tensor, span, slot, need)
        # A node may save its own output, which would keep the node alive. detach() has the same version counter.
        return (tensor.detach(), tensor._version) if outer is None else outer[0](tensor)

    def unpack(saved: Any) -> torch.Tensor:
        if type(saved) is _View:  # of this unit, or of a unit around it
            return _needed(saved)
        return _unchanged(*saved) if outer is None else outer[1](saved)

    hooks = (pack, unpack)
    _push(*hooks)
    return hooks


def _needed(view: _View) -> torch.Tensor:
    _unchanged(view.tensor, view.version)
    view.need(view.slot)
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
        push(view.span, view.slot, view.need)  # create_graph: until this node of backward ends
    return view.tensor


def _unchanged(tensor: torch.Tensor, version: int) -> torch.Tensor:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {list(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor


def pop(hooks: Hooks | None) -> None:
    """Remove the hooks of ``push``, unless an error has left other hooks above them."""
    if hooks is not None and _top is not None:
        top = _top(True)
        if top is not None and top[0] is hooks[0]:
            _pop()


for _function in (push, pop):  # not compiled; torch.compiler.disable would do it too, but imports all of dynamo
    _function._torchdynamo_disable = True  # type: ignore[union-attr]
