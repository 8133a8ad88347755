"""``deepspeed.ops.adagrad``: makes ``zcomm.optim.CPUAdagrad``."""

from __future__ import annotations

from zcomm import optim
from zcomm.compat.deepspeed.ops import refuse
from zcomm.compat.deepspeed.ops.adam import Params


def DeepSpeedCPUAdagrad(
    model_params: Params,
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> optim.CPUAdagrad:
    """Make Adagrad. Raises: NotImplementedError for what has no kernel."""
    refuse("DeepSpeedCPUAdagrad", amsgrad=(amsgrad, False), fp32_optimizer_states=(fp32_optimizer_states, True))
    return optim.CPUAdagrad(model_params, lr, eps=eps, weight_decay=weight_decay)
