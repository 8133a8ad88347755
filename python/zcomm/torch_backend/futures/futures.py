"""Futures of collectives, whose callbacks run in order (callbacks.py).

Only a Future that torch's ``then`` has made can carry an error into C++, and torch makes those of its own class. So the
class gets methods that look whether a Future is one of ours, and do for all others what they did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from zcomm.torch_backend.futures.threads import is_serving

if TYPE_CHECKING:
    from zcomm.torch_backend.futures.callbacks import Callbacks
    from zcomm.torch_backend.futures.work import Pending

_Future: Any = torch._C.Future
_then, _add_done_callback, _wait = _Future.then, _Future.add_done_callback, _Future.wait
_ours: weakref.WeakKeyDictionary[Any, tuple[Pending, Callbacks]] = weakref.WeakKeyDictionary()


def order_callbacks(future: Any, work: Pending, callbacks: Callbacks) -> None:
    """Let ``callbacks`` run those that the program registers on ``future``, which ends with ``work``."""
    _ours[future] = (work, callbacks)


def _register(register: Callable[[Any, Any], Any], future: Any, callback: Callable[[Any], Any]) -> Any:
    ours = _ours.get(future)
    if ours is None or future.done():
        return register(future, callback)
    work, callbacks = ours
    if is_serving():  # a callback inside of a callback: here and now, as its order has it
        work.settle()
        _end_of(future)
        return register(future, callback)
    gate = work.new_future()
    result = register(gate, lambda _: callback(future))
    callbacks.run_after(work, future, gate)
    return result


def then(self: Any, callback: Callable[[Any], Any]) -> Any:
    return _register(_then, self, callback)


def add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
    _register(_add_done_callback, self, callback)


def wait(self: Any) -> Any:
    ours = _ours.get(self)
    if ours is not None:
        ours[0].start_now()
    return _wait(self)


def _end_of(future: Any) -> None:
    """Wait for the Future of a work that has ended: the thread that settled it may still have to complete it."""
    try:
        _wait(future)
    except Exception:
        return  # its callbacks see it


def install() -> None:
    """Replace the methods of torch's class, once per process."""
    for method, original in ((then, _then), (add_done_callback, _add_done_callback), (wait, _wait)):
        method.__doc__ = original.__doc__
        setattr(_Future, method.__name__, method)
