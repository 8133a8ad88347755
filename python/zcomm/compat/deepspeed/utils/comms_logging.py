"""``deepspeed.utils.comms_logging``: zcomm's log of collectives under DeepSpeed's names."""

from __future__ import annotations

from zcomm.profiling.comms import CommsLogger

__all__ = ["CommsLogger"]
