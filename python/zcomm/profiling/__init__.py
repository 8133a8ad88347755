"""``zcomm.profile(path)``: a timeline of a few steps, of all ranks, for Perfetto or chrome://tracing."""

from __future__ import annotations

from zcomm.profiling.recorder import Profile, profile

__all__ = ["Profile", "profile"]
