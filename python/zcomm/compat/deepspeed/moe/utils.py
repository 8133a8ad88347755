"""``deepspeed.moe.utils``: tests for experts, which answer that there are none."""

from __future__ import annotations

from typing import Any

from torch import nn

from zcomm.compat.deepspeed.lazy import names_of

__getattr__ = names_of(__name__)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): deepspeed.moe.layer.MoE cannot be constructed."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Return True for a parameter that a program has marked as an expert's (``allreduce`` is False)."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True for a group that a program has marked so."""
    return bool(param_group.get("moe", False))
