"""Parallel forms next to ZeRO: layers and schedules that divide a model among ranks. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.parallel.expert_blocks import divide_experts
    from zcomm.parallel.experts import MoE
    from zcomm.parallel.pipeline_layers import LayerSpec, TiedLayerSpec
    from zcomm.parallel.pipelining import Bubble, Pipeline, pipeline
    from zcomm.parallel.sequence import mean_over_sequence, split_sequence, ulysses
    from zcomm.parallel.tensors import tensor

# name -> module that defines it
_HOME = {
    "Bubble": "pipelining",
    "LayerSpec": "pipeline_layers",
    "MoE": "experts",
    "divide_experts": "expert_blocks",
    "Pipeline": "pipelining",
    "TiedLayerSpec": "pipeline_layers",
    "mean_over_sequence": "sequence",
    "pipeline": "pipelining",
    "split_sequence": "sequence",
    "ulysses": "sequence",
    "tensor": "tensors",
}

__all__ = [
    "Bubble",
    "LayerSpec",
    "MoE",
    "divide_experts",
    "Pipeline",
    "TiedLayerSpec",
    "mean_over_sequence",
    "pipeline",
    "split_sequence",
    "tensor",
    "ulysses",
]

if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
