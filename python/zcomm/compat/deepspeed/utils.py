"""``deepspeed.utils``: whole tensors by parameter, under DeepSpeed's names (zcomm.zero's functions), and its logger.

A frozen parameter has a value alone: the other getters give None for it, so that a loop may visit all parameters.

All are collective, as there. ``safe_get_local_*`` is not here: shards are cut from flat buckets, so that a rank's part
of a parameter is another than DeepSpeed's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from zcomm.zero import full_grad, full_optim_state, set_full_optim_state
from zcomm.zero import full_param as safe_get_full_fp32_param
from zcomm.zero import set_full_grad as safe_set_full_grad
from zcomm.zero import set_full_param as safe_set_full_fp32_param
from zcomm.zero.registry import owner_of

__all__ = [
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]

logger = logging.getLogger("zcomm")


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return ``zcomm.zero.full_grad``; None for a frozen parameter, ``param.grad`` of one that no optimizer here has.

    Inside of ``no_sync()``, before anything is reduced: this rank's sum, divided by the accumulation steps.
    """
    owner = owner_of(param)
    if (owner is None or owner[2] is None) and param.grad is not None:
        return param.grad
    if owner is not None and type(param.grad) is torch.Tensor:
        reducer = owner[1].reducer
        if not reducer.sync and reducer.reached == 0:
            return param.grad.float() / owner[0].gradient_factor
    return None if _is_frozen(param) else full_grad(param)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return ``zcomm.zero.full_optim_state``; None for a frozen parameter."""
    return None if _is_frozen(param) else full_optim_state(param, optim_state_key)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Call ``zcomm.zero.set_full_optim_state``."""
    set_full_optim_state(param, value, optim_state_key)


def _is_frozen(param: torch.Tensor) -> bool:
    """Return True if ``param`` is of an engine's model, and not trained there."""
    owner = owner_of(param)
    return owner is not None and (owner[2] is None or owner[1].geometry.is_frozen(owner[2]))


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on ``ranks`` (None, or -1 among them: on all)."""
    from zcomm.comm import job

    rank = job.current().rank if job.is_initialized() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
