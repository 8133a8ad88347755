"""``deepspeed.ops.lion``: ``zcomm.optim.CPULion``, with the defaults of DeepSpeed, which are not those of the paper."""

from __future__ import annotations

from zcomm import optim
from zcomm.compat.deepspeed.ops import refuse
from zcomm.compat.deepspeed.ops.adam import Betas, Params


def DeepSpeedCPULion(
    model_params: Params,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> optim.CPULion:
    """Make Lion for ``initialize(optimizer=)``, or for the CPU. Raises: NotImplementedError for what has no kernel."""
    refuse("DeepSpeedCPULion", fp32_optimizer_states=(fp32_optimizer_states, True))
    return optim.CPULion(model_params, lr, betas, weight_decay)


def FusedLion(
    params: Params,
    lr: float = 1e-3,
    betas: Betas = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> optim.CPULion:
    """Make the same Lion; on a device for ``initialize(optimizer=)`` alone, which steps it where its state is."""
    return optim.CPULion(params, lr, betas, weight_decay)
