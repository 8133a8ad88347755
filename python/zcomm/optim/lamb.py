"""Lamb: LAMB as DeepSpeed's FusedLamb computes it, in torch's own operations, and its arithmetic in parts.

An update has two halves. The moments and the direction belong to each element. The trust ratio needs the norms of the
whole weight and of the whole direction. So ZeroOptimizer calls the halves apart (zero/rules/lamb_rule.py).
Each line is one rounded operation, so the bits do not depend on a shard's bounds or device.
Source: You et al. (arXiv:1904.00962), with the moments corrected in the rate and the ratio clamped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.optim.options import check_options, evaluated, given

_PART_COUNT = 1 << 20


@dataclass(frozen=True)
class LambNumbers:
    """Numbers of one group in one step. rate: the learning rate with the moments' correction."""

    rate: float
    betas: tuple[float, float]
    eps: float
    inside: bool
    decay: float
    least: float
    most: float


def numbers_of(group: dict[str, Any], step: int) -> LambNumbers:
    """Return the numbers of step number ``step``, from 1, with a group's options."""
    beta1, beta2 = map(float, group["betas"])
    rate = float(group["lr"])
    if group["bias_correction"]:
        rate *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
    return LambNumbers(
        rate,
        (beta1, beta2),
        float(group["eps"]),
        bool(group["eps_inside_sqrt"]),
        float(group["weight_decay"]),
        float(group["min_coeff"]),
        float(group["max_coeff"]),
    )


def move_moments(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, grad: torch.Tensor, numbers: LambNumbers) -> None:
    """Update both moments with a gradient, in place."""
    beta1, beta2 = numbers.betas
    exp_avg.mul_(beta1).add_(grad.mul(1 - beta1))
    exp_avg_sq.mul_(beta2).add_(grad.mul(grad).mul_(1 - beta2))


def exact_root(values: torch.Tensor) -> torch.Tensor:
    """Return square roots; of fp32 they are rounded once.

    torch's fp32 root on the CPU is MKL's, which is sometimes an ulp off. Through fp64 it is exact, on each device.
    Memory: 8 bytes for each of _PART_COUNT elements, and the result.
    """
    if values.dtype == torch.float64:
        return values.sqrt()
    root = torch.empty_like(values, memory_format=torch.contiguous_format)
    for part, out in zip(values.reshape(-1).split(_PART_COUNT), root.view(-1).split(_PART_COUNT), strict=True):
        out.copy_(part.double().sqrt_())
    return root


def direction(
    weight: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, numbers: LambNumbers
) -> torch.Tensor:
    """Return the direction of the update, which the trust ratio and the rate scale."""
    root = exact_root(exp_avg_sq.add(numbers.eps)) if numbers.inside else exact_root(exp_avg_sq).add_(numbers.eps)
    found = torch.div(exp_avg, root, out=root)
    return found.add_(weight.mul(numbers.decay)) if numbers.decay else found


def trust_ratio(weight_norm: float, direction_norm: float, numbers: LambNumbers) -> float:
    """Return the factor of a whole parameter's update: 1 if a norm is 0; NaN if the ratio is NaN."""
    if weight_norm == 0 or direction_norm == 0:
        return 1.0
    ratio = weight_norm / direction_norm
    return ratio if math.isnan(ratio) else min(max(ratio, numbers.least), numbers.most)


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError naming an option out of its range, NotImplementedError for one that is not available."""
    check_options(group, "LAMB", ("lr", "weight_decay", "min_coeff"), ("amsgrad",))
    if not torch.tensor(float(group["eps"]), dtype=torch.float32) > 0:
        raise ValueError(f"eps={group['eps']} must be above 0 in fp32")
    if not float(group["max_coeff"]) >= float(group["min_coeff"]):
        raise ValueError(f"max_coeff={group['max_coeff']} must be at least min_coeff={group['min_coeff']}")


class Lamb(torch.optim.Optimizer):
    """LAMB: Adam's direction, scaled for each parameter by the ratio of the norms of its weight and its direction.

    params: fp32 or fp64 parameters (or groups), on any device. For other dtypes pass it to a ZeroOptimizer.
    betas, eps, weight_decay: of Adam; the decay belongs to the direction. bias_correction: correct the moments, by way
    of the rate. eps_inside_sqrt: eps is added below the root. min_coeff, max_coeff: limits of the ratio.
    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq``.

    Raises: ValueError naming a hyperparameter out of range. NotImplementedError for a sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        eps_inside_sqrt: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = given(locals())
        check_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's. Raises: ValueError, NotImplementedError; the optimizer is then as before."""
        check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters. closure: re-evaluates the model and returns the loss, as in torch."""
        loss = evaluated(closure)
        for group in self.param_groups:
            check_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, group)
        return loss

    def _step_param(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if param.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Lamb: a parameter is {param.dtype}; give Lamb to a ZeroOptimizer, which has its master")
        if grad.is_sparse:
            raise NotImplementedError("Lamb: a gradient is sparse; use dense ones")
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        numbers = numbers_of(group, int(state["step"]))
        move_moments(state["exp_avg"], state["exp_avg_sq"], grad, numbers)
        update = direction(param, state["exp_avg"], state["exp_avg_sq"], numbers)
        norms = [float(each.double().square().sum().sqrt()) for each in (param, update)]
        param.sub_(update.mul_(numbers.rate * trust_ratio(norms[0], norms[1], numbers)))
