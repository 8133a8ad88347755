"""``deepspeed.runtime.zero.partition_parameters``: statuses, the parameters' views, ``Init``, ``GatheredParameters``.

Importing it gives sharded parameters ``ds_id`` and so on (parameter_views.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.runtime.zero import parameter_views
from zcomm.compat.deepspeed.runtime.zero.init import Init
from zcomm.compat.deepspeed.runtime.zero.parameter_views import ZeroParamStatus, ZeroParamType
from zcomm.zero import GatheredParameters

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange

parameter_views.install()


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return ``fn``. Programs replace this function to stop a conversion, which zcomm's ``Init`` does not do."""
    return fn


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Only check the arguments, because a module of stage 3 may use parameters of other modules.

    Raises: RuntimeError if they are not a module and a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter() takes a module and a parameter, not {type(module).__name__} and "
            f"{type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Only check the arguments, as ``register_external_parameter``."""
    register_external_parameter(module, parameter)
