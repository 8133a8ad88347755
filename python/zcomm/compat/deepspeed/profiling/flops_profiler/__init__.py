"""``deepspeed.profiling.flops_profiler``: floating point operations of a model's forward."""

from __future__ import annotations

from zcomm.compat.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_model_profile

__all__ = ["FlopsProfiler", "get_model_profile"]
