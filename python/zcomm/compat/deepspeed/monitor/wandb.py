"""``deepspeed.monitor.wandb``: its monitor."""

from __future__ import annotations

from zcomm.compat.deepspeed.monitor.monitor import WandbMonitor

__all__ = ["WandbMonitor"]
