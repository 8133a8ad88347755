"""Options of optimizers: as constructors take them, and the checks that several share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

Loss = TypeVar("Loss")


def given(arguments: dict[str, Any], *without: str) -> dict[str, Any]:
    """Return the options of ``arguments``, the ``locals()`` of a constructor's first line. without: none of these."""
    hidden = ("self", "params", "__class__", *without)
    return {name: value for name, value in arguments.items() if name not in hidden}


def evaluated(closure: Callable[[], Loss] | None) -> Loss | None:
    """Return the loss of ``closure``, which runs the model again, with gradients."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_options(group: dict[str, Any], name: str, positive: Iterable[str], absent: Iterable[str]) -> None:
    """Check the options of a group of the optimizer ``name``.

    positive: options that are at least 0. absent: switches that are not available. Raises: ValueError naming an option
    out of its range, NotImplementedError for one that is not available.
    """
    for key in positive:
        if not float(group[key]) >= 0:
            raise ValueError(f"{key}={group[key]} must be at least 0")
    if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
    if group.get("max_grad_norm", 0):
        raise NotImplementedError(
            f"max_grad_norm={group['max_grad_norm']} is not available: clip_norm= of ZeroOptimizer, or "
            '"gradient_clipping" of the configuration, clips by the norm of all gradients'
        )
    for key in absent:
        if group.get(key, False):
            raise NotImplementedError(f"{key}=True is not available: {name} has no such variant")
