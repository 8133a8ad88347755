"""OnebitAdam: options of 1-bit Adam, and its arithmetic after the freeze.

Up to step ``freeze_step`` it is AdamW on averaged gradients. Then the second moment is frozen, and gradients stay on
their rank. Each step moves the first moment by this rank's gradient, and the ranks average the moments with one bit per
element (``codec="sign"``), with error feedback.
Each line of ``step_weight`` is one rounded operation, so ranks with other processors compute the same bits.
Source: Tang et al. (arXiv:2102.02888); names and defaults are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class AdamNumbers:
    """Numbers of a parameter in one step after the freeze.

    rate: the learning rate over the first moment's correction. root: factor of the root of the second moment. shrink:
    factor of the weight. grad: factor of the gradient, with its part in the moment.
    """

    beta: float
    grad: float
    rate: float
    root: float
    eps: float
    shrink: float


def numbers_of(group: dict[str, Any], steps: int, grad_scale: float) -> AdamNumbers:
    """Return the numbers of step number ``steps``, from 1, with a group's options. grad_scale: of the gradients."""
    (beta1, beta2), rate, root = group["betas"], float(group["lr"]), 1.0
    shrink = 1.0 - rate * float(group["weight_decay"])
    if group["bias_correction"]:
        root = 1.0 / math.sqrt(1.0 - beta2 ** min(steps, group["freeze_step"]))  # the moment keeps its correction
        rate /= 1.0 - beta1**steps
    return AdamNumbers(beta1, (1.0 - beta1) * grad_scale, rate, root, float(group["eps"]), shrink)


def step_weight(weight: torch.Tensor, exp_avg: torch.Tensor, root: torch.Tensor, numbers: AdamNumbers) -> None:
    """Update the fp32 ``weight`` in place. root: of the frozen second moment."""
    if numbers.shrink != 1.0:
        weight.mul_(numbers.shrink)
    weight.sub_(exp_avg.div(root.mul(numbers.root).add_(numbers.eps)).mul_(numbers.rate))


def check_group(group: dict[str, Any], name: str) -> None:
    """Raise ValueError naming an option out of its range, NotImplementedError for one that is not available."""
    for key in ("lr", "eps", "weight_decay"):
        if not float(group[key]) >= 0:
            raise ValueError(f"{key}={group[key]} must be at least 0")
    if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} must be two numbers in [0, 1)")
    if group.get("max_grad_norm", 0):
        raise NotImplementedError(
            f"max_grad_norm={group['max_grad_norm']} is not available: clip_norm= of ZeroOptimizer, or "
            '"gradient_clipping" of the configuration, clips by the norm of all gradients'
        )
    for key in ("amsgrad", "eps_inside_sqrt", "maximize"):
        if group.get(key, False):
            raise NotImplementedError(f"{key}=True is not available: {name} has no such variant")


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the option is a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number, at least {least}")


class _InZeroOptimizer(torch.optim.Optimizer):
    """An optimizer that only holds options: a ZeroOptimizer of stage 0 runs it."""

    def step(self, closure: Any = None) -> Any:
        """Raise RuntimeError: give the optimizer to a ZeroOptimizer."""
        name = type(self).__name__
        raise RuntimeError(
            f"{name}.step(): it exchanges moments with the other ranks: give it to zcomm.ZeroOptimizer(model, "
            f"{name}(...), stage=0), or name it in the configuration of zcomm.initialize()"
        )


class OnebitAdam(_InZeroOptimizer):
    """1-bit Adam: AdamW up to step ``freeze_step``, then first moments that the ranks exchange with 1 bit per element.

    For ``zcomm.ZeroOptimizer(model, OnebitAdam(...), stage=0)``; the name is "onebit_adam". weight_decay: decoupled.
    bias_correction: correct both moments; after the freeze the second one keeps its correction. (DeepSpeed accepts the
    option, and never corrects.) cuda_aware, comm_backend_name: DeepSpeed's, without effect.

    Raises: ValueError naming an option out of its range; NotImplementedError for one that is not available.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        cuda_aware: bool = False,
        comm_backend_name: str = "",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "freeze_step": freeze_step,
            "bias_correction": bias_correction,
        }
        check_onebit_adam(defaults)
        super().__init__(params, defaults)


def check_onebit_adam(group: dict[str, Any]) -> None:
    """Raise as ``check_group``."""
    check_group(group, "1-bit Adam")
    check_whole("freeze_step", group["freeze_step"])
