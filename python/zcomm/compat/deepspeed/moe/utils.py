"""``deepspeed.moe.utils``: tests for experts, which answer that there are none, and groups without them."""

from __future__ import annotations

from collections.abc import Sequence
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


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups as a list, which is all that there is to do without experts. Their ``params`` become lists.

    Raises: ValueError where it is no dict, list or tuple; NotImplementedError for a parameter of an expert.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}: a dict, or a list of them, is expected")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        for param in group["params"]:
            if is_moe_param(param):
                raise NotImplementedError(
                    f"a parameter of shape {tuple(param.shape)} has allreduce=False, an expert's: zcomm has no mixture "
                    "of experts; train without it"
                )
    return groups
