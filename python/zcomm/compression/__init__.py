"""Compression of a model while it is trained: fewer bits, zeros in place of weights, smaller layers, fewer layers.

prepare() changes layers by torch's parametrizations, Schedule drives them by steps, clean() makes a plain model of the
result. Settings are DeepSpeed's section "compression_training". Names load on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.compression.cleaning import clean
    from zcomm.compression.preparing import is_prepared, prepare
    from zcomm.compression.schedule import Schedule

# name -> module that defines it
_HOME = {"Schedule": "schedule", "clean": "cleaning", "is_prepared": "preparing", "prepare": "preparing"}

__all__ = ["Schedule", "clean", "is_prepared", "prepare"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
