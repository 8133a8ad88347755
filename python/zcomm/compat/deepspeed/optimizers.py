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


# Options that must have one value, those without effect, and names in zcomm.
_NEEDED = {
    "bias_correction": True,
    "amsgrad": False,
    "fp32_optimizer_states": True,
    "eps_inside_sqrt": False,
    "max_grad_norm": 0.0,
}
_ONE_BIT = "eps_inside_sqrt max_grad_norm amsgrad"
_SILENT = ("deepspeed", "cuda_aware", "comm_backend_name", "set_grad_none")
_NAMES = {"adamw_mode": "adamw", "adam_w_mode": "adamw", "model_params": "params"}


def _options(name: str, arguments: dict[str, Any], refused: str) -> dict[str, Any]:
    """Return zcomm's options for ``arguments`` of a call of ``name``.

    Raises: NotImplementedError naming an option of ``refused`` that is not as _NEEDED.
    """
    for option in refused.split():
        value, needed = arguments.pop(option), _NEEDED[option]
        if value != needed:
            raise NotImplementedError(f"{name}({option}={value!r}) is not available; leave it {needed!r}")
    return {_NAMES.get(option, option): value for option, value in arguments.items() if option not in _SILENT}


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
    return optim.CPUAdam(**_options("DeepSpeedCPUAdam", locals(), "bias_correction amsgrad fp32_optimizer_states"))


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
    options = _options("FusedAdam", locals(), "bias_correction amsgrad")
    given: list[Any] = []
    every: list[torch.Tensor] = []
    for item in params:
        own = item["params"] if isinstance(item, dict) else [item]
        own = [own] if isinstance(own, torch.Tensor) else list(own)  # once: it may be an iterator
        given.append({**item, "params": own} if isinstance(item, dict) else item)
        every += own
    kind = optim.FusedAdam if any(param.is_cuda for param in every) else optim.CPUAdam
    return kind(**{**options, "params": given})


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
    return optim.Lamb(**_options("FusedLamb", locals(), "max_grad_norm amsgrad"))


def DeepSpeedCPULion(
    model_params: Params,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> optim.CPULion:
    """Return Lion for ``initialize(optimizer=)`` or the CPU. Raises: NotImplementedError without a kernel."""
    return optim.CPULion(**_options("DeepSpeedCPULion", locals(), "fp32_optimizer_states"))


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
    return optim.CPUAdagrad(**_options("DeepSpeedCPUAdagrad", locals(), "amsgrad fp32_optimizer_states"))


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
    return optim.OnebitAdam(**_options("OnebitAdam", locals(), _ONE_BIT))


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
    return optim.ZeroOneAdam(**_options("ZeroOneAdam", locals(), _ONE_BIT))


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
    return optim.OnebitLamb(**_options("OnebitLamb", locals(), _ONE_BIT))
