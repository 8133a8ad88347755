"""Inference of models that do not fit into memory: weights are read unit by unit. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.inference.stream import Streamed, stream, streamed

_HOME = {"Streamed": "stream", "stream": "stream", "streamed": "stream"}  # name -> module that defines it

__all__ = ["Streamed", "stream", "streamed"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value  # ``stream`` is also the name of its module, which the import has put here
        return value
