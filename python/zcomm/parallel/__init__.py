"""Parallel forms next to ZeRO: layers and schedules that divide a model among ranks. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.parallel.expert_blocks import divide_experts
    from zcomm.parallel.experts import MoE
    from zcomm.parallel.sequence import mean_over_sequence, split_sequence, ulysses
    from zcomm.parallel.tensors import tensor

# name -> module that defines it
_HOME = {
    "MoE": "experts",
    "divide_experts": "expert_blocks",
    "mean_over_sequence": "sequence",
    "split_sequence": "sequence",
    "ulysses": "sequence",
    "tensor": "tensors",
}

__all__ = [
    "MoE",
    "divide_experts",
    "mean_over_sequence",
    "split_sequence",
    "tensor",
    "ulysses",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
