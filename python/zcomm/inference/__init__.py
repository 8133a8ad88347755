"""Inference of models that do not fit into memory: weights are read unit by unit. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.inference.batch import BatchPlan, plan
    from zcomm.inference.streaming import Streamed, stream, streamed

_HOME = {  # name -> module that defines it
    "BatchPlan": "batch",
    "Streamed": "streaming",
    "plan": "batch",
    "stream": "streaming",
    "streamed": "streaming",
}

__all__ = ["BatchPlan", "Streamed", "plan", "stream", "streamed"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
