"""``deepspeed.ops.lamb.fused_lamb``: the names of ``deepspeed.ops.lamb``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.lamb import FusedLamb

__all__ = ["FusedLamb"]
