"""``deepspeed.ops.adam``: DeepSpeed's arguments; makes ``zcomm.optim.CPUAdam``, or FusedAdam on CUDA."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import optim
from zcomm.compat.deepspeed.ops import refuse

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]
Betas = tuple[float, float]


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
    """Make Adam, or AdamW with ``adamw_mode``. Raises: NotImplementedError for what has no kernel."""
    refuse(
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
    """Make Adam as DeepSpeedCPUAdam does, for parameters on any device.

    set_grad_none: of zero_grad(), which does so anyway.
    """
    refuse("FusedAdam", bias_correction=(bias_correction, True), amsgrad=(amsgrad, False))
    given: list[Any] = []
    every: list[torch.Tensor] = []
    for item in params:
        own = item["params"] if isinstance(item, dict) else [item]
        own = [own] if isinstance(own, torch.Tensor) else list(own)  # once: it may be an iterator
        given.append({**item, "params": own} if isinstance(item, dict) else item)
        every += own
    kind = optim.FusedAdam if any(param.is_cuda for param in every) else optim.CPUAdam
    return kind(given, lr, betas, eps, weight_decay, adam_w_mode)
