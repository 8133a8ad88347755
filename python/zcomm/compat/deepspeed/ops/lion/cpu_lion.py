"""``deepspeed.ops.lion.cpu_lion``: the names of ``deepspeed.ops.lion``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.lion import DeepSpeedCPULion

__all__ = ["DeepSpeedCPULion"]
