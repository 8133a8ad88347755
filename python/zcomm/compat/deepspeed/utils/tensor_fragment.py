"""``deepspeed.utils.tensor_fragment``: whole tensors by parameter, under DeepSpeed's names (zcomm.zero's functions).

A frozen parameter has only a value: the other getters return None for it, so that a loop may visit all parameters.

All are collective, as in DeepSpeed. ``safe_get_local_*`` and ``safe_set_local_*`` are for stage 3, on the elements of
``ds_tensor``, which this rank keeps. Shards are cut from flat buckets, so the ranks' parts differ in size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zcomm.zero import full_grad, full_optim_state, set_full_optim_state
from zcomm.zero import full_param as safe_get_full_fp32_param
from zcomm.zero import set_full_grad as safe_set_full_grad
from zcomm.zero import set_full_param as safe_set_full_fp32_param
from zcomm.zero.registry import owner_of
from zcomm.zero.tensors import local_shard

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return ``zcomm.zero.full_grad``; None for a frozen parameter, ``param.grad`` of one without a ZeroOptimizer.

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
    """Return True if ``param`` is of an engine's model, and not trained by it."""
    owner = owner_of(param)
    return owner is not None and (owner[2] is None or owner[1].geometry.is_frozen(owner[2]))


def safe_update_full_grad_vectorized(
    param_list: Sequence[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, parameter)``. Frozen parameters are left out.

    ``update_func`` sees the whole gradient in fp32, and is called once per parameter on every rank.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param) if param.requires_grad else None
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's elements of the master, flat, a copy; None for a frozen parameter."""
    return None if _is_frozen(param) else local_shard.own_param(param)


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's elements of ``safe_get_full_grad``, flat; None for a frozen parameter."""
    return None if _is_frozen(param) else local_shard.own_grad(param)


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return this rank's elements of a state array, flat, a copy; None for a frozen parameter."""
    return None if _is_frozen(param) else local_shard.own_optim_state(param, optim_state_key)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's elements of master and weight. Frozen parameters are not changed."""
    if not _is_frozen(param):
        local_shard.set_own_param(param, value)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replace this rank's elements of the gradient. Frozen parameters are not changed."""
    if not _is_frozen(param):
        local_shard.set_own_grad(param, value)


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Replace this rank's elements of a state array. Frozen parameters are not changed."""
    if not _is_frozen(param):
        local_shard.set_own_optim_state(param, value, optim_state_key)
