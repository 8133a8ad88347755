"""Legality of a policy of updates for a program: at construction, and from step to step.

``choose_policy`` decides once, for all buckets. "auto" takes the first of "backward", "forward" and "step" that is
legal. A policy that is given by name raises if it is not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zcomm.zero.param_groups import options_of
from zcomm.zero.parts import TrainState
from zcomm.zero.rules.cohorts import COUNTERS

_UNITS = (
    "stage=3 by units with weights and state on the host: give params='nvme' or share_parameters=False for a "
    "model on the CPU, and offload all of params and optimizer for one on a device"
)
NEEDS_UNITS = f"needs {_UNITS}, or leave it out"
_REREAD = "parameters that a program keeps in a list could be read before their update: give update='forward'"
logger = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Place:
    """The place of weights and state. by_unit: stage 3 by units, with both on the host. on_device: weights are whole on
    a device (stages 0 to 2)."""

    by_unit: bool
    on_device: bool


def choose_policy(model: nn.Module | None, train: TrainState, place: Place, rank: int) -> str:
    """Return the policy: "step", "forward", "behind" (forward, of weights that are whole on a device) or "backward".

    Raises: ValueError, NotImplementedError for a policy that is given, and that the program cannot have.
    """
    offload = train.offload
    if offload.step_behind_forward:
        return _forward(model, train, place, "step_behind_forward=True")
    if offload.update == "step":
        return "step"
    if offload.update == "forward":
        return _forward(model, train, place, "update='forward'")
    if offload.update == "backward":
        _check_units(model, train, place, "update='backward'")
        why = train.needs_all_gradients
        if why:
            raise ValueError(
                f"Offload: update='backward' with {why}, which needs all gradients of a step before the first update: "
                "leave that out, or give update='forward' or 'auto'"
            )
        if offload.gradients != "nvme":
            raise ValueError(
                "Offload: update='backward' needs gradients='nvme', for the first two steps: give it, or "
                "update='forward'"
            )
        return "backward"
    try:
        if place.on_device:
            raise ValueError(f"Offload: update='auto': {_REREAD}")
        _check_units(model, train, place, "update='auto'")
    except (ValueError, NotImplementedError) as error:
        if rank == 0:
            logger.info("updates run in step(): %s", error)
        return "step"
    return "forward" if train.needs_all_gradients or offload.gradients != "nvme" else "backward"


def _forward(model: nn.Module | None, train: TrainState, place: Place, given: str) -> str:
    """Return the kind of updates in forward that the program can have. given: the option that asks for them."""
    if not place.on_device:
        _check_units(model, train, place, given)
        return "forward"
    if model is None:
        raise ValueError(f"Offload: {given} needs the model itself: its modules wait for their weights")
    if train.offload.gradients == "nvme":
        raise ValueError(f"Offload: {given} with gradients='nvme': zero_grad() waits for that step: leave one out")
    if train.rule.whole_matrices:
        raise NotImplementedError(f"{train.rule.name}: {given} is not available: leave it out, or use AdamW")
    return "behind"


def _check_units(model: nn.Module | None, train: TrainState, place: Place, given: str) -> None:
    """Check that updates can run in gathers. Raises: ValueError, NotImplementedError."""
    if not place.by_unit:
        also = "" if "backward" in given else ", or the model itself on a device in stage 0, 1 or 2"
        raise ValueError(f"Offload: {given} needs {_UNITS}{also}, or leave it out")
    if train.rule.sums or train.rule.whole_matrices:
        raise NotImplementedError(
            f"Offload: {given}: {train.rule.name} needs whole parameters or matrices of all ranks for its update: "
            "leave it out, or use AdamW"
        )
    for name, module in model.named_modules() if model is not None else ():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"Offload: {given}: {name} has max_norm, which changes its weight while it runs: leave one out"
            )


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
