"""``zcomm.profile(path)``: a timeline of a few steps, of all ranks, for Perfetto or chrome://tracing.

``zcomm.torch_profiler()`` marks the same operations in the trace of torch.profiler.
"""

from __future__ import annotations

from zcomm.profiling.ranges import torch_profiler
from zcomm.profiling.recorder import Profile, profile

__all__ = ["Profile", "profile", "torch_profiler"]
