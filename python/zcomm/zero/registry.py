"""Registry: which ZeroOptimizers of this process are open, and which of them has or trains a parameter.

Optimizers that are open when the program ends are closed. Only the registry reads an optimizer's own attributes
(``Owner``); others get its Parts and its TrainState from it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from typing import Any, Protocol

import torch
from torch import nn

from zcomm.zero.module_hook import Hook
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.sharded.param import original


class Owner(Protocol):
    """The attributes of a ZeroOptimizer that this module reads.

    _parts: None once it is closed. _of_parent: this is a forked child, and the parent made it.
    """

    _parts: Parts | None
    _of_parent: bool
    _train: TrainState

    def _close(self, keep_weights: bool) -> None: ...


_open: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()  # with the process that made it
_last_opened: int | None = None  # the process


def opened(owner: Owner) -> None:
    """Add an optimizer, until it is closed."""
    global _last_opened
    _last_opened = os.getpid()
    if parent_process() is not None and not any(_open[other] == os.getpid() for other in _owners()):
        Finalize(None, _close_all, exitpriority=1)  # ranks that multiprocessing starts skip atexit
    _open[owner] = os.getpid()


def _owners() -> list[Owner]:
    """List the opened optimizers that are alive. A thread may open another one meanwhile."""
    return [owner for ref in _open.keyrefs() if (owner := ref()) is not None]


def open_optimizers() -> list[Owner]:
    """List the optimizers of this process that are not closed."""
    return [owner for owner in _owners() if owner._parts is not None]


def _every_parts() -> list[Parts]:
    return [parts for owner in _owners() if (parts := owner._parts) is not None]


def open_parts(owner: Owner) -> Parts:
    """Return the parts, which an async step may still use. Raises: RuntimeError if it is closed."""
    if owner._parts is None:
        raise RuntimeError("this ZeroOptimizer is closed")
    if owner._parts.closed:
        raise RuntimeError(
            "this ZeroOptimizer was closed by another object that shares its attributes (a wrapper that took its "
            "__dict__): keep that object open, and close one of them only"
        )
    return owner._parts


def parts_of(owner: Owner) -> Parts:
    """Return the parts after ``Parts.join``. Raises: RuntimeError if it is closed; the error of that step."""
    return open_parts(owner).join()


def train_of(owner: Owner) -> TrainState:
    """Return its TrainState, also after it was closed."""
    return owner._train


def owned_params() -> set[int]:
    """Collect the parameters of all open optimizers, by id()."""
    return {key for parts in _every_parts() for key in parts.index_of}


def optimizers_of(params: Iterable[torch.Tensor]) -> list[Owner]:
    """List the open optimizers that have some of these parameters."""
    keys = set(map(id, params))
    return [owner for owner in open_optimizers() if not keys.isdisjoint(open_parts(owner).index_of)]


def _is_trained(param: torch.Tensor) -> bool:
    """Return True if an open optimizer trains ``param``, or a model that has it."""
    trains = [parts for parts in _every_parts() if parts.geometry.buckets]
    if any(id(param) in parts.index_of for parts in trains):
        return True  # for each gradient: skips the parameters of other models
    return any(param is other for parts in trains for other in parts.model.parameters())


def refuse_gradients(model: nn.Module) -> list[Any]:
    """Make a gradient of a parameter of ``model``, which is not trained, an error that names it: the gradient would be
    neither averaged nor used. Returns: the hooks' handles."""
    return [
        param.register_post_accumulate_grad_hook(Hook(_Refusal(name)))
        for name, param in model.named_parameters()
        if param.requires_grad
    ]


class _Refusal:
    """Raises RuntimeError for the gradient of the parameter ``name``, unless another optimizer trains it by now."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, param: torch.Tensor) -> None:
        if _is_trained(param):
            return
        param.grad = None
        raise RuntimeError(
            f"backward has reached the parameter {self._name} of a model without an optimizer (optimizer=None, or no "
            'section "optimizer"): only this rank would have its gradient. Give an optimizer to train it, or '
            "freeze it (requires_grad_(False)), or run the model under torch.no_grad()"
        )


def whole_frozen(parts: Parts) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the floating-point parameters of the model that no optimizer's store has, by name."""
    kept = owned_params() | set(parts.index_of)
    for name, param in parts.model.named_parameters():
        if id(param) not in kept and param.is_floating_point():
            yield name, param


def owner_of(param: torch.Tensor) -> tuple[TrainState, Parts, int | None] | None:
    """Find the open optimizer that has a parameter: its state, its parts and the parameter's number there.

    The number is None for a parameter of its model that the store does not have: it is whole on each rank. Returns
    None if no open optimizer knows it. Updates may wait for a forward: see UpdateHooks.
    """
    whole, param = None, original(param)
    for owner in open_optimizers():
        parts = open_parts(owner)
        parts.updates.join()
        parts.rebinder.put_back()
        index = parts.index_of.get(id(param))
        if index is not None:
            return owner._train, parts, index
        if whole is None and any(param is other for other in parts.model.parameters()):
            whole = (owner._train, parts, None)
    return whole


def _begin_anew() -> None:
    for owner in _owners():
        owner._of_parent = True


os.register_at_fork(after_in_child=_begin_anew)


@atexit.register
def _close_all() -> None:
    """Close open optimizers, so that a program that ends or fails without close() leaves no swap file.

    A forked child skips its parent's optimizers: their threads and files are the parent's.
    """
    for owner in _owners():
        if not owner._of_parent:
            owner._close(keep_weights=False)
    if _last_opened == os.getpid():
        _drop_left_nodes()


def _drop_left_nodes() -> None:
    """Let autograd drop the nodes of backward passes that an error has ended, on this thread.

    Its queue keeps them until the next pass, else until the thread ends, which is after Python. They have tensors over
    memory that Python's objects hold, and freeing those then is a segmentation fault. A node is taken in the order of
    its number: all others come before the last one here.
    """
    with torch.inference_mode(False), torch.enable_grad(), contextlib.suppress(RuntimeError):
        last = torch.zeros(1, device="cpu", requires_grad=True) * 1  # whatever the program's default device is
        last.grad_fn._set_sequence_nr(0)  # type: ignore[union-attr]
        last.backward()
