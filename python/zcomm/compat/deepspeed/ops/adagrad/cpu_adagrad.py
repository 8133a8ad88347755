"""``deepspeed.ops.adagrad.cpu_adagrad``: the names of ``deepspeed.ops.adagrad``."""

from __future__ import annotations

from zcomm.compat.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad

__all__ = ["DeepSpeedCPUAdagrad"]
