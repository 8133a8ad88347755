"""``deepspeed.monitor.csv_monitor``: its monitor."""

from __future__ import annotations

from zcomm.compat.deepspeed.monitor.monitor import csvMonitor

__all__ = ["csvMonitor"]
