"""``deepspeed.monitor.tensorboard``: its monitor."""

from __future__ import annotations

from zcomm.compat.deepspeed.monitor.monitor import TensorBoardMonitor

__all__ = ["TensorBoardMonitor"]
