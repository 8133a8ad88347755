"""OnebitAdam, ZeroOneAdam, OnebitLamb: options of the 1-bit optimizers, and the numbers of their steps.

At first they are AdamW or LAMB on averaged gradients. Later gradients stay on their rank, and the ranks exchange
moments, gradients or changes of weights with one bit per element (``codec="sign"``), with error feedback.
Each line of ``step_weight`` is one rounded operation, so ranks with other processors compute the same bits.
Sources: 1-bit Adam: Tang et al. (arXiv:2102.02888); 0/1 Adam: Lu et al. (2202.06009); 1-bit LAMB: Li et al.
(2104.06069). Names and defaults are DeepSpeed's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.optim import lamb
from zcomm.optim.options import check_options, given


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


@dataclass(frozen=True)
class ZeroOneNumbers:
    """Numbers of a parameter in one step of 0/1 Adam after the first averaged steps.

    scale: of gradients. rate, root, eps: as AdamNumbers. decay: factor of the weight in its change.
    """

    beta: float
    beta2: float
    scale: float
    rate: float
    root: float
    eps: float
    decay: float


def zero_one_numbers(group: dict[str, Any], steps: int, grad_scale: float, averaged: int) -> ZeroOneNumbers:
    """Return the numbers of step number ``steps``, from 1. averaged: steps that have moved the second moment."""
    (beta1, beta2), rate, root = group["betas"], float(group["lr"]), 1.0
    decay = rate * float(group["weight_decay"])
    if group["bias_correction"]:
        root = 1.0 / math.sqrt(1.0 - beta2 ** min(steps, averaged))
        rate /= 1.0 - beta1**steps
    return ZeroOneNumbers(beta1, beta2, grad_scale, rate, root, float(group["eps"]), decay)


def averaged_steps(step: int, scaler: int) -> tuple[int, int]:
    """Return for step number ``step`` of 0/1 Adam's phase 1 the interval of averaged steps, and their number until
    then. The interval doubles after each ``scaler`` of them."""
    interval, count, begin = 1, 0, 0
    while step > (last := (begin // interval + scaler) * interval):
        interval, count, begin = 2 * interval, count + scaler, last
    return interval, count + step // interval - begin // interval


def local_interval(step: int, scaler: int, most: int) -> int:
    """Return the interval of exchanges in step number ``step``, from 1, of 0/1 Adam's phase 2."""
    return min(most, 1 << min((step - 1) // scaler, 62))


@dataclass(frozen=True)
class FrozenLamb:
    """Numbers of a parameter in one step of 1-bit LAMB after the freeze.

    rate, eps, decay: as LambNumbers. grad: as AdamNumbers. The rest: limits of the factor, see ``next_factor``.
    """

    beta: float
    beta2: float
    grad: float
    rate: float
    eps: float
    decay: float
    least: float
    most: float
    threshold: float


def frozen_lamb(group: dict[str, Any], steps: int, grad_scale: float) -> FrozenLamb:
    """Return the numbers of step number ``steps``, from 1, with a group's options. grad_scale: of the gradients."""
    (beta1, beta2), rate = group["betas"], float(group["lr"])
    if group["bias_correction"]:
        rate *= math.sqrt(1.0 - beta2 ** min(steps, group["freeze_step"])) / (1.0 - beta1**steps)
    limits = (float(group[key]) for key in ("factor_min", "factor_max", "factor_threshold"))
    return FrozenLamb(
        beta1, beta2, (1.0 - beta1) * grad_scale, rate, float(group["eps"]), float(group["weight_decay"]), *limits
    )


def next_factor(factor: float, last: float, numbers: FrozenLamb) -> float:
    """Return ``factor`` within its limits, which are also relative to the last step's."""
    if math.isnan(factor):
        return factor
    factor = min(max(factor, numbers.least), numbers.most)
    return min(max(factor, last * (1.0 - numbers.threshold)), last * (1.0 + numbers.threshold))


def step_weight(weight: torch.Tensor, exp_avg: torch.Tensor, root: torch.Tensor, numbers: AdamNumbers) -> None:
    """Update the fp32 ``weight`` in place. root: of the frozen second moment."""
    if numbers.shrink != 1.0:
        weight.mul_(numbers.shrink)
    weight.sub_(exp_avg.div(root.mul(numbers.root).add_(numbers.eps)).mul_(numbers.rate))


def check_group(group: dict[str, Any], name: str) -> None:
    """Raise ValueError naming an option out of its range, NotImplementedError for one that is not available."""
    check_options(group, name, ("lr", "eps", "weight_decay"), ("amsgrad", "eps_inside_sqrt", "maximize"))


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
        defaults = given(locals(), "cuda_aware", "comm_backend_name")
        check_onebit_adam(defaults)
        super().__init__(params, defaults)


def check_onebit_adam(group: dict[str, Any]) -> None:
    """Raise as ``check_group``."""
    check_group(group, "1-bit Adam")
    check_whole("freeze_step", group["freeze_step"])


class ZeroOneAdam(_InZeroOptimizer):
    """0/1 Adam: averaged gradients more and more rarely, then local steps between exchanges of 1 bit per element.

    For ``zcomm.ZeroOptimizer(model, ZeroOneAdam(...), stage=0)``; the name is "zero_one_adam". Up to step
    ``var_freeze_step`` each k-th step has averaged gradients, and the others exchange gradients with 1 bit. k is 1, and
    doubles after each ``var_update_scaler`` averaged steps. Afterwards each rank steps weights of its own, and each
    j-th step exchanges the changes. j is 1, doubles every ``local_step_scaler`` steps, and is at most
    ``local_step_clipper``. Other options: as OnebitAdam.

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
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        bias_correction: bool = True,
        cuda_aware: bool = False,
        comm_backend_name: str = "",
    ) -> None:
        defaults = given(locals(), "cuda_aware", "comm_backend_name")
        check_zero_one_adam(defaults)
        super().__init__(params, defaults)


def check_zero_one_adam(group: dict[str, Any]) -> None:
    """Raise as ``check_group``."""
    check_group(group, "0/1 Adam")
    for key in ("var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"):
        check_whole(key, group[key])


class OnebitLamb(_InZeroOptimizer):
    """1-bit LAMB: LAMB up to step ``freeze_step``, then first moments that the ranks exchange with 1 bit per element.

    For ``zcomm.ZeroOptimizer(model, OnebitLamb(...), stage=0)``; the name is "onebit_lamb". After the freeze a
    parameter's trust ratio is the average of the warm-up's, which keeps ``coeff_beta`` of its value in a step, times a
    factor: the largest ratio of the roots of the frozen second moment and of the present one. The factor is at least
    ``factor_min``, at most ``factor_max``, and changes by at most ``factor_threshold`` of itself in a step. Options of
    the warm-up: as Lamb. cuda_aware, comm_backend_name: DeepSpeed's, without effect.

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
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        bias_correction: bool = True,
        cuda_aware: bool = False,
        comm_backend_name: str = "",
    ) -> None:
        defaults = given(locals(), "cuda_aware", "comm_backend_name")
        check_onebit_lamb(defaults)
        super().__init__(params, defaults)


def check_onebit_lamb(group: dict[str, Any]) -> None:
    """Raise as ``check_group``."""
    check_group(group, "1-bit LAMB")
    lamb.check_group(group)
    check_whole("freeze_step", group["freeze_step"])
    for key in ("coeff_beta", "factor_threshold"):
        if not 0 <= float(group[key]) < 1:
            raise ValueError(f"{key}={group[key]} must lie in [0, 1)")
    if not 0 < float(group["factor_min"]) <= float(group["factor_max"]):
        raise ValueError(
            f"factor_min={group['factor_min']} must be more than 0, and at most factor_max={group['factor_max']}"
        )
