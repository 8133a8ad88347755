"""Which ZeroOptimizers of this process are open; what is open when the program ends is closed."""

from __future__ import annotations

import atexit
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zcomm.zero.optimizer import ZeroOptimizer

_open: weakref.WeakSet[ZeroOptimizer] = weakref.WeakSet()


def opened(optimizer: ZeroOptimizer) -> None:
    """It is one of them, until it is closed."""
    _open.add(optimizer)


def open_optimizers() -> list[ZeroOptimizer]:
    """Those of this process that are not closed."""
    return [optimizer for optimizer in _open if optimizer._parts is not None]


def taken_params() -> set[int]:
    """By id(), the parameters that any of them has."""
    return {key for optimizer in _open if optimizer._parts is not None for key in optimizer._parts.index_of}


@atexit.register
def _close_all() -> None:
    """A program that ends, or fails, without close() leaves no swap file."""
    for optimizer in list(_open):
        optimizer._close(keep_weights=False)
