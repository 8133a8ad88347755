"""``deepspeed.accelerator.real_accelerator``: the choice of the accelerator."""

from __future__ import annotations

from zcomm.compat.deepspeed.accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
