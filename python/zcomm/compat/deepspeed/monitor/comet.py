"""``deepspeed.monitor.comet``: its monitor."""

from __future__ import annotations

from zcomm.compat.deepspeed.monitor.monitor import CometMonitor

__all__ = ["CometMonitor"]
