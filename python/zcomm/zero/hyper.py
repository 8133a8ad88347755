"""Hyperparameters: which fused optimizer is meant, and a param group as the core's kernel takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zcomm import _core
from zcomm.optim.adam import adam_params

_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "maximize": False},
    "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "maximize": False},
}
_TORCH = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam"}
_HARMLESS = {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"}


def named_optimizer(
    optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer, args: dict[str, Any]
) -> tuple[bool, dict[str, Any]]:
    """(decoupled weight decay?, defaults of a param group) for ``optimizer`` with the caller's ``args``.

    Raises: ValueError for another optimizer, an unknown or impossible argument.
    """
    kind = optimizer if isinstance(optimizer, (type, str)) else type(optimizer)
    name = kind.lower() if isinstance(kind, str) else _TORCH.get(kind, getattr(kind, "__name__", str(kind)))
    if name not in _DEFAULTS:
        raise ValueError(f"optimizer={name!r} is not available; use 'adamw', 'adam' or torch.optim's Adam or AdamW")
    given = {} if isinstance(optimizer, str | type) else _own_defaults(optimizer)
    for key, value in args.items():
        if key not in _DEFAULTS[name]:
            raise ValueError(f"{key}={value!r}: {name} has no such argument; it has {', '.join(_DEFAULTS[name])}")
    adamw = name == "adamw" or bool(getattr(optimizer, "defaults", {}).get("decoupled_weight_decay", False))
    defaults = {**_DEFAULTS[name], **given, **args}
    check_group(defaults)
    return adamw, defaults


def _own_defaults(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    defaults = dict(optimizer.defaults)
    if defaults.pop("amsgrad", False):
        raise ValueError("amsgrad=True is not available")
    if optimizer.state:
        raise ValueError("optimizer: it has taken steps already; pass it before its first step")
    return {key: value for key, value in defaults.items() if key not in _HARMLESS}


def check_group(group: dict[str, Any]) -> None:
    """Raises: ValueError naming a hyperparameter out of its range."""
    beta1, beta2 = group["betas"]
    for key, value, fine in (
        ("lr", group["lr"], group["lr"] >= 0),
        ("betas", group["betas"], 0 <= beta1 < 1 and 0 <= beta2 < 1),
        ("eps", group["eps"], group["eps"] >= 0),
        ("weight_decay", group["weight_decay"], group["weight_decay"] >= 0),
    ):
        if not fine:
            raise ValueError(f"{key}={value!r} is out of range")


def torch_groups(
    model: nn.Module | Iterable[Any], optimizer: str | type[torch.optim.Optimizer] | torch.optim.Optimizer
) -> list[Any]:
    """Trainable parameters, or the param groups that the caller gave."""
    if isinstance(optimizer, torch.optim.Optimizer):
        keep = {"params", *_DEFAULTS["adamw"]}
        return [{k: v for k, v in group.items() if k in keep} for group in optimizer.param_groups]
    source: Iterable[Any] = model.parameters() if isinstance(model, nn.Module) else model
    params = list(source)
    if params and isinstance(params[0], dict):
        return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in params]
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        raise ValueError("no parameter requires a gradient")
    return trainable


def step_params(group: dict[str, Any], adamw: bool, grad_scale: float) -> _core.AdamParams:
    """A param group of this step for the fused kernel."""
    params = adam_params(group, adamw)
    params.step = group["step"]
    params.grad_scale = grad_scale
    return params
