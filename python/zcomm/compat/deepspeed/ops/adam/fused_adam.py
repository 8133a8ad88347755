"""``deepspeed.ops.adam.fused_adam``: the names of ``deepspeed.ops.adam``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.adam import FusedAdam

__all__ = ["FusedAdam"]
