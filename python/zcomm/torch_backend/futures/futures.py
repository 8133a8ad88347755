"""Futures of collectives. Their callbacks run in order (callbacks.py).

Only a Future that torch's ``then`` has made can carry an error into C++, and torch makes those of its own class. So the
class gets methods that look whether a Future is one of ours, and do for all others what they did.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zcomm.torch_backend.futures.threads import is_serving

if TYPE_CHECKING:
    from zcomm.torch_backend.futures.callbacks import Call, Callbacks
    from zcomm.torch_backend.futures.work import Pending

_Future: Any = torch._C.Future
_then, _add_done_callback, _wait = _Future.then, _Future.add_done_callback, _Future.wait
_collect_all: Any = torch._C._collect_all
_ours: weakref.WeakKeyDictionary[Any, tuple[Pending, Callbacks]] = weakref.WeakKeyDictionary()
_turns: weakref.WeakKeyDictionary[Any, Call] = weakref.WeakKeyDictionary()  # of what ``then`` has made
_members: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()  # of what collect_all has made
_LOOK_S = 0.1  # between looks at the deadline


def order_callbacks(future: Any, work: Pending, callbacks: Callbacks) -> None:
    """Let ``callbacks`` run those that the program registers on ``future``, which ends with ``work``."""
    _ours[future] = (work, callbacks)


def _register(register: Callable[[Any, Any], Any], future: Any, callback: Callable[[Any], Any]) -> Any:
    ours = _ours.get(future)
    if ours is None or future.done():
        turn = _turns.get(future)
        return _keep_turn(register(future, callback), turn)
    work, callbacks = ours
    if is_serving():  # a callback inside of a callback: here and now, as its order has it
        work.finish()
        _end_of(future)
        return register(future, callback)
    gate = work.new_future()
    result = register(gate, lambda _: callback(future))
    return _keep_turn(result, callbacks.run_after(work, future, gate))


def _keep_turn(result: Any, turn: Call | None) -> Any:
    if result is not None and turn is not None:
        _turns[result] = turn
    return result


def then(self: Any, callback: Callable[[Any], Any]) -> Any:
    return _register(_then, self, callback)


def add_done_callback(self: Any, callback: Callable[[Any], Any]) -> None:
    _register(_add_done_callback, self, callback)


def wait(self: Any) -> Any:
    """Return the value. Waits where handlers of signals run."""
    if self.done() or not _is_known(self):
        return _wait(self)
    _let_come(self)
    gate = threading.Lock()
    gate.acquire()
    _add_done_callback(self, lambda _: gate.release())
    while not gate.acquire(timeout=_LOOK_S):
        if (turn := _turns.get(self)) is not None:
            turn.check_deadline()
    return _wait(self)


def collect_all(futures: Sequence[Any]) -> Any:
    result = _collect_all(futures)
    if members := [future for future in futures if _is_known(future)]:
        _members[result] = members
    return result


def _is_known(future: Any) -> bool:
    return future in _ours or future in _turns or future in _members


def _let_come(future: Any) -> None:
    """Start, or run, what this thread would wait for though its own callback is before that in the order."""
    if (ours := _ours.get(future)) is not None:
        ours[0].start_now()
    if (turn := _turns.get(future)) is not None:
        turn.come()
    for member in _members.get(future, ()):
        _let_come(member)


def _end_of(future: Any) -> None:
    """Wait for the Future of a work that has ended: the thread that finished it may still have to complete it."""
    try:
        _wait(future)
    except Exception:
        return  # its callbacks see it


def install() -> None:
    """Replace the methods of torch's class, once per process."""
    for method, original in ((then, _then), (add_done_callback, _add_done_callback), (wait, _wait)):
        method.__doc__ = original.__doc__
        setattr(_Future, method.__name__, method)
    torch._C._collect_all = collect_all
