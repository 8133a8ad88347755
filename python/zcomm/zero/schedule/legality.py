"""Legality of a policy of updates for a program: at construction, and from step to step.

``choose_policy`` decides once, for all buckets. "auto" is "forward" if trained weights or their state are on a drive
and nothing prevents it, else "step". A policy that is given by name raises if it is not legal.

[Note: auto] "auto" updates late only if this saves time and no read can come before the update. It never raises for a
program that "step" takes.
- Weights that are whole in memory: stages 0 to 2, and stage 3 in memory that ranks share. No hook runs before a read of
  ``model.weight``, so a program could read old weights after ``step()``.
- Weights that are whole on a device: Behind delays reads of a module's attributes. It cannot see parameters in a list.
- Units with shards and state in memory: a late update moves the same bytes, and uses the cores that the forward needs.
  Its errors would come later, without a gain.
- Units with weights or state on a drive: "forward" saves the step's read of the weights. The drive works while the
  forward computes.
- "backward" must be given by name. A program that sets a rate before ``step()``, perhaps in step 1,000 only, gets an
  error after its weights have changed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from zcomm.zero.layout.sections import NoModel
from zcomm.zero.parts import TrainState

_UNITS = (
    "stage=3 by units with weights and state on the host: give params='nvme' or share_parameters=False for a "
    "model on the CPU, and offload all of params and optimizer for one on a device"
)
NEEDS_UNITS = f"needs {_UNITS}, or leave it out"
_WHOLE = "weights are whole in memory, so a program could read them before their update"
_REREAD = "parameters that a program keeps in a list could be read before their update: give update='forward'"
_PARTLY = "some weights or optimizer state stay on the device"
_IN_MEMORY = "no trained weights or optimizer state are on a drive, so a later update would save nothing"
logger = logging.getLogger("zcomm")


@dataclass(frozen=True)
class Place:
    """The place of weights and state.

    by_unit: stage 3 by units, with both on the host or a drive. on_device: weights are whole on a device (stages 0 to
    2). partly: stage 3 by units, and some of both stay on a device. on_drive: trained weights or state are on a drive.
    one_rank: there are no others.
    """

    by_unit: bool = False
    on_device: bool = False
    partly: bool = False
    on_drive: bool = False
    one_rank: bool = False


def choose_policy(model: nn.Module, train: TrainState, place: Place, rank: int) -> str:
    """Return the policy: "step", "forward", "backward", or for weights that are whole on a device "behind" (forward) or
    "slots" (backward).

    Raises: ValueError, NotImplementedError for a policy that is given by name, and is illegal for the program.
    """
    offload = train.offload
    if offload.step_behind_forward:
        return _forward(model, train, place, "step_behind_forward=True")
    if offload.update == "step":
        return "step"
    if offload.update == "forward":
        return _forward(model, train, place, "update='forward'")
    if offload.update == "backward":
        if not place.on_device:
            _check_units(model, train, place, "update='backward'")
        why = train.needs_all_gradients
        if why:
            raise ValueError(
                f"Offload: update='backward' with {why}, which needs all gradients of a step before the first update: "
                "leave that out, or give update='forward' or 'auto'"
            )
        if place.on_device:
            _check_slots(model, train, place)
            return "slots"
        if offload.gradients != "nvme":
            raise ValueError(
                "Offload: update='backward' needs gradients='nvme', for the first two steps: give it, or "
                "update='forward'"
            )
        return "backward"
    policy, why = _best(model, train, place)
    if why and rank == 0:
        logger.info("updates run in step(): %s", why)
    return policy


def _best(model: nn.Module, train: TrainState, place: Place) -> tuple[str, str]:
    """Return the policy of "auto" ([Note: auto]), and the obstacle of "forward", or ""."""
    if place.on_device:
        return "step", _REREAD
    if not place.by_unit:
        return "step", _PARTLY if place.partly else _WHOLE
    if not place.on_drive:
        return "step", _IN_MEMORY
    obstacle = _whole_update(train) or _max_norm(model)
    if obstacle:
        return "step", obstacle
    return "forward", ""


def _forward(model: nn.Module, train: TrainState, place: Place, given: str) -> str:
    """Return the policy for updates in forward. given: the option that requests them."""
    if not place.on_device:
        _check_units(model, train, place, given)
        return "forward"
    if isinstance(model, NoModel):
        raise ValueError(f"Offload: {given} needs the model itself: its modules wait for their weights")
    if train.offload.gradients == "nvme":
        raise ValueError(f"Offload: {given} with gradients='nvme': zero_grad() waits for that step: leave one out")
    if train.rule.whole_matrices:
        raise NotImplementedError(f"{train.rule.name}: {given} is not available: leave it out, or use AdamW")
    return "behind"


def _check_slots(model: nn.Module, train: TrainState, place: Place) -> None:
    """Check that updates can use gradients up in backward, for weights that are whole on a device ([Note: update from
    slots]). Raises: ValueError, NotImplementedError."""
    given, rule, gradients = (
        "Offload: update='backward', for weights that are whole on a device,",
        train.rule,
        train.offload.gradients,
    )
    if not place.one_rank:
        raise ValueError(f"{given} needs one rank: the host adds up gradients of several ranks: give update='forward'")
    if gradients not in (None, "cpu"):
        raise ValueError(f"{given} keeps no gradients, but gradients={gradients!r}: leave gradients= out")
    if isinstance(model, NoModel):
        raise ValueError(f"{given} needs the model itself: its modules wait for their weights")
    if why := _whole_update(train):
        raise NotImplementedError(f"{given} {why}: leave it out, or use AdamW")
    if not rule.takes_half and train.precision.communication_dtype != torch.float32:
        raise NotImplementedError(f"{given} {rule.name} takes gradients in fp32 only: leave it out, or use AdamW")


def _check_units(model: nn.Module, train: TrainState, place: Place, given: str) -> None:
    """Check that updates can run in gathers. Raises: ValueError, NotImplementedError."""
    if not place.by_unit:
        also = ", or the model itself on a device in stage 0, 1 or 2"
        raise ValueError(f"Offload: {given} needs {_UNITS}{also}, or leave it out")
    if why := _whole_update(train):
        raise NotImplementedError(f"Offload: {given}: {why}: leave it out, or use AdamW")
    if why := _max_norm(model):
        raise ValueError(f"Offload: {given}: {why}: leave one out")


def _whole_update(train: TrainState) -> str:
    """Name the optimizer, if its update needs whole parameters; return "" if not."""
    if train.rule.sums or train.rule.whole_matrices:
        return f"{train.rule.name} needs whole parameters or matrices of all ranks for its update"
    return ""


def _max_norm(model: nn.Module) -> str:
    """Name a module that changes its own weight; return "" if there is none."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return f"{name} has max_norm, which changes its weight while it runs"
    return ""


def name_in(model: nn.Module, param: torch.Tensor) -> str:
    """Name a parameter, also one that the optimizer does not have."""
    return next((name for name, other in model.named_parameters() if other is param), f"of shape {tuple(param.shape)}")
