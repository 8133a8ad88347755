"""Attention in bounded memory: Evoformer's with two biases, and attention to blocks of a layout.

Products and softmax are torch's. This package decides which part of them is in memory at a time. Names load on first
use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.attention.block_sparse import block_sparse_attention
    from zcomm.attention.evoformer import evoformer_attention

# name -> module that defines it
_HOME = {"block_sparse_attention": "block_sparse", "evoformer_attention": "evoformer"}

__all__ = ["block_sparse_attention", "evoformer_attention"]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
