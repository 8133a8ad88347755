"""DeepSpeed's optimizers, ``deepspeed.ops.adam`` and so on: with its arguments and defaults, by ``zcomm.optim``.

Source: DeepSpeed's argument lists. Its defaults of Lion are not the paper's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import optim

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
Betas = tuple[float, float]


def _refuse(name: str, **asked: Any) -> None:
    """Refuse options with another value than the one that they must have.

    asked: option: (value, the value it must have). Raises: NotImplementedError naming one that is another.
    """
    for option, (value, needed) in asked.items():
        if value != needed:
            raise NotImplementedError(f"{name}({option}={value!r}) is not available; leave it {needed!r}")


def DeepSpeedCPUAdam(
    model_params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> optim.CPUAdam:
    """Return Adam, or AdamW with ``adamw_mode``. Raises: NotImplementedError for options without a kernel."""
    _refuse(
        "DeepSpeedCPUAdam",
        bias_correction=(bias_correction, True),
        amsgrad=(amsgrad, False),
        fp32_optimizer_states=(fp32_optimizer_states, True),
    )
    return optim.CPUAdam(model_params, lr, betas, eps, weight_decay, adamw_mode)


def FusedAdam(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> optim.CPUAdam | optim.FusedAdam:
    """Return Adam as DeepSpeedCPUAdam does, for parameters on any device.

    set_grad_none: of zero_grad(), which does so anyway.
    """
    _refuse("FusedAdam", bias_correction=(bias_correction, True), amsgrad=(amsgrad, False))
    given: list[Any] = []
    every: list[torch.Tensor] = []
    for item in params:
        own = item["params"] if isinstance(item, dict) else [item]
        own = [own] if isinstance(own, torch.Tensor) else list(own)  # once: it may be an iterator
        given.append({**item, "params": own} if isinstance(item, dict) else item)
        every += own
    kind = optim.FusedAdam if any(param.is_cuda for param in every) else optim.CPUAdam
    return kind(given, lr, betas, eps, weight_decay, adam_w_mode)


def FusedLamb(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> optim.Lamb:
    """Return LAMB for ``initialize(optimizer=)``. Raises: NotImplementedError for its own clipping, and amsgrad.

    The configuration's "gradient_clipping" clips.
    """
    _refuse("FusedLamb", max_grad_norm=(max_grad_norm, 0.0), amsgrad=(amsgrad, False))
    return optim.Lamb(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        bias_correction=bias_correction,
        eps_inside_sqrt=eps_inside_sqrt,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
    )


def DeepSpeedCPULion(
    model_params: Params,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> optim.CPULion:
    """Return Lion for ``initialize(optimizer=)`` or the CPU. Raises: NotImplementedError without a kernel."""
    _refuse("DeepSpeedCPULion", fp32_optimizer_states=(fp32_optimizer_states, True))
    return optim.CPULion(model_params, lr, betas, weight_decay)


def FusedLion(
    params: Params,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> optim.CPULion:
    """Return the same Lion; on a device only for ``initialize(optimizer=)``, which steps it on its state's device."""
    return optim.CPULion(params, lr, betas, weight_decay)


def DeepSpeedCPUAdagrad(
    model_params: Params,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> optim.CPUAdagrad:
    """Return Adagrad. Raises: NotImplementedError for options without a kernel."""
    _refuse("DeepSpeedCPUAdagrad", amsgrad=(amsgrad, False), fp32_optimizer_states=(fp32_optimizer_states, True))
    return optim.CPUAdagrad(model_params, lr, eps=eps, weight_decay=weight_decay)


def OnebitAdam(
    params: Params,
    deepspeed: Any = None,
    lr: float = 1e-3,
    freeze_step: int = 100_000,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    amsgrad: bool = False,
    cuda_aware: bool = False,
    comm_backend_name: str = "nccl",
) -> optim.OnebitAdam:
    """Return 1-bit Adam for ``initialize(optimizer=)``. Raises: NotImplementedError for its own clipping, and variants.

    deepspeed, cuda_aware, comm_backend_name: without effect.
    """
    name = "OnebitAdam"
    _refuse(
        name, eps_inside_sqrt=(eps_inside_sqrt, False), max_grad_norm=(max_grad_norm, 0.0), amsgrad=(amsgrad, False)
    )
    return optim.OnebitAdam(
        params, lr, betas, eps, weight_decay, freeze_step=freeze_step, bias_correction=bias_correction
    )


def ZeroOneAdam(
    params: Params,
    deepspeed: Any = None,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    var_freeze_step: int = 100_000,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 16,
    amsgrad: bool = False,
    cuda_aware: bool = False,
    comm_backend_name: str = "nccl",
) -> optim.ZeroOneAdam:
    """Return 0/1 Adam for ``initialize(optimizer=)``. Raises: as ``OnebitAdam``."""
    name = "ZeroOneAdam"
    _refuse(
        name, eps_inside_sqrt=(eps_inside_sqrt, False), max_grad_norm=(max_grad_norm, 0.0), amsgrad=(amsgrad, False)
    )
    return optim.ZeroOneAdam(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        var_freeze_step=var_freeze_step,
        var_update_scaler=var_update_scaler,
        local_step_scaler=local_step_scaler,
        local_step_clipper=local_step_clipper,
        bias_correction=bias_correction,
    )


def OnebitLamb(
    params: Params,
    deepspeed: Any = None,
    lr: float = 1e-3,
    freeze_step: int = 100_000,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
    cuda_aware: bool = False,
    comm_backend_name: str = "nccl",
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
) -> optim.OnebitLamb:
    """Return 1-bit LAMB for ``initialize(optimizer=)``. Raises: as ``OnebitAdam``."""
    name = "OnebitLamb"
    _refuse(
        name, eps_inside_sqrt=(eps_inside_sqrt, False), max_grad_norm=(max_grad_norm, 0.0), amsgrad=(amsgrad, False)
    )
    return optim.OnebitLamb(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        freeze_step=freeze_step,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
        coeff_beta=coeff_beta,
        factor_max=factor_max,
        factor_min=factor_min,
        factor_threshold=factor_threshold,
        bias_correction=bias_correction,
    )
