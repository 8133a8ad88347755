"""``deepspeed.ops.adam.cpu_adam``: the names of ``deepspeed.ops.adam``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.adam import DeepSpeedCPUAdam

__all__ = ["DeepSpeedCPUAdam"]
