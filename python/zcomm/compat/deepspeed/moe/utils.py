"""``deepspeed.moe.utils``: tests for experts' parameters, and their param groups.

ZeroOptimizer finds experts by the parameters' marks, so that param groups may mix them with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed.moe.layer import MoE


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether the model has a layer ``deepspeed.moe.layer.MoE``, and the number of experts of the first."""
    counts = [module.num_experts for module in m.modules() if isinstance(module, MoE)]
    return bool(counts), counts[0] if counts else 0


def is_moe_param(param: Any) -> bool:
    """Return True for a parameter that is marked as an expert's (``allreduce`` is False)."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True for a param group of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters outside of experts, and the parameters of experts."""
    return [p for p in params if not is_moe_param(p)], [p for p in params if is_moe_param(p)]


def split_params_grads_into_shared_and_expert_params(
    group: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of parameters outside of experts, and of experts' parameters."""
    shared, experts = split_params_into_shared_and_expert_params([param for param in group if param.grad is not None])
    return [p.grad for p in shared if p.grad is not None], [p.grad for p in experts if p.grad is not None]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float | None = 178956971
) -> list[dict[str, Any]]:
    """Return the groups without experts, and groups with ``moe: True`` of at most ``max_group_size`` elements behind.

    The given groups are changed: they lose their experts. Raises: ValueError if it is no dict, list or tuple.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}: a dict, or a list of them, is expected")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    found: list[dict[str, Any]] = []
    for group in groups:
        shared, experts = split_params_into_shared_and_expert_params(list(group["params"]))
        group["params"] = shared
        for name in dict.fromkeys(getattr(param, "group_name", None) for param in experts):
            found += _cut(group, name, [p for p in experts if getattr(p, "group_name", None) == name], max_group_size)
    return [*groups, *found]


def _cut(
    group: dict[str, Any], name: str | None, params: list[torch.Tensor], most: float | None
) -> list[dict[str, Any]]:
    parts: list[list[torch.Tensor]] = [[]]
    size = 0
    for param in params:
        if most is not None and parts[-1] and size + param.numel() > most:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += param.numel()
    return [{**group, "name": name, "moe": True, "params": part} for part in parts]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Return param groups for parameters, or for groups of which none is of experts yet. Raises: TypeError."""
    for each in model_parameters:
        if not isinstance(each, (torch.Tensor, dict)):
            raise TypeError(f"model_parameters: expected tensors or dicts, got {type(each).__name__}")
    if isinstance(model_parameters[0], torch.Tensor):
        plain = {"params": list(model_parameters), "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(plain)
    if any(is_moe_param_group(group) for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)
