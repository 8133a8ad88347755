"""Legality of a policy of updates for a program: at construction, and from step to step.

``choose_update`` decides once, for all buckets. "auto" takes the first of "backward", "forward" and "step" that is
legal. A policy that is given by name raises if it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zcomm.zero.param_groups import options_of
from zcomm.zero.parts import TrainState
from zcomm.zero.rules.cohorts import COUNTERS

NEEDS_UNITS = (
    "needs stage=3 by units with weights and state on the host: give params='nvme' or share_parameters=False for a "
    "model on the CPU, and offload all of params and optimizer for one on a device, or leave it out"
)


def choose_update(model: nn.Module | None, train: TrainState, by_unit: bool) -> str:
    """Return where updates run: "step", "forward" or "backward". Raises: ValueError, NotImplementedError.

    by_unit: stage 3 by units, with weights and state on the host.
    """
    update = train.offload.update
    if update == "auto":
        try:
            _check_update(model, train, by_unit, "auto")
        except (ValueError, NotImplementedError):
            return "step"
        return "forward" if train.needs_all_gradients or train.offload.gradients != "nvme" else "backward"
    if update != "step":
        _check_update(model, train, by_unit, update)
    if update == "backward":
        why = train.needs_all_gradients
        if why:
            raise ValueError(
                f"Offload: update='backward' with {why}, which needs all gradients of a step before the first update: "
                "leave that out, or give update='forward' or 'auto'"
            )
        if train.offload.gradients != "nvme":
            raise ValueError(
                "Offload: update='backward' needs gradients='nvme', for the first two steps: give it, or "
                "update='forward'"
            )
    return update


def _check_update(model: nn.Module | None, train: TrainState, by_unit: bool, update: str) -> None:
    """Check that updates can run elsewhere than in step(). Raises: ValueError, NotImplementedError."""
    what = f"Offload: update={update!r}"
    if not by_unit:
        raise ValueError(f"{what} {NEEDS_UNITS}")
    if train.rule.sums or train.rule.whole_matrices:
        raise NotImplementedError(
            f"{what}: {train.rule.name} needs whole parameters or matrices of all ranks for its update: leave it out, "
            "or use AdamW"
        )
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(f"{what}: {name} has max_norm, which changes its weight while it runs: leave one out")


def name_in(model: nn.Module | None, param: torch.Tensor) -> str:
    """Name a parameter, also one that the optimizer does not have."""
    modules = model.named_parameters() if model is not None else ()
    return next((name for name, other in modules if other is param), f"of shape {tuple(param.shape)}")


def thawed(model: nn.Module | None, frozen: Sequence[torch.Tensor]) -> str:
    """Name a parameter that was frozen at construction, and may get a gradient now; return "" if there is none."""
    found = next((param for param in frozen if param.requires_grad), None)
    return "" if found is None else f"parameter {name_in(model, found)}, which was frozen, requires a gradient now"


def options_now(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the options of param groups, without counters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in options_of(group).items()
            if key not in COUNTERS
        }
        for group in groups
    ]


def are_equal(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> bool:
    """Return True if two results of ``options_now`` have the same values."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        return bool(a == b)

    return len(before) == len(now) and all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(before, now, strict=True)
    )
