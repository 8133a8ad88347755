"""``deepspeed.ops.lion.fused_lion``: the names of ``deepspeed.ops.lion``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.lion import FusedLion

__all__ = ["FusedLion"]
