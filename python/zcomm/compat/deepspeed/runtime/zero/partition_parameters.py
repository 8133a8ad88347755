"""``deepspeed.runtime.zero.partition_parameters``: statuses, the parameters' views, ``Init``, ``GatheredParameters``.

Importing it gives sharded parameters ``ds_id`` and so on (parameter_views.py).
Source: DeepSpeed's argument list of ``Init``.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zcomm import zero
from zcomm.compat.deepspeed import init_distributed
from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.runtime.zero import parameter_views
from zcomm.compat.deepspeed.runtime.zero.parameter_views import ZeroParamStatus, ZeroParamType
from zcomm.compat.deepspeed.utils.groups import check_mpu
from zcomm.config import load
from zcomm.zero import GatheredParameters
from zcomm.zero.materialize.init import is_inside
from zcomm.zero.tensors.gathered import share_first_values

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_accelerator",
    "register_external_parameter",
    "unregister_external_parameter",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange

parameter_views.install()


class Init(zero.Init):
    """zcomm.zero.Init, which joins the job (``init_distributed``) if torch.distributed has no default group.

    The end of the outermost context is collective, as it is in DeepSpeed. All ranks then have rank 0's values. All
    parameters have ``ds_id``, also small ones and those in ``module``, which are in memory until ``initialize``.
    Arguments that place or pin memory have no effect, because ZeroOptimizer decides that.
    data_parallel_group, sequence_data_parallel_group: None, or a group of all ranks.
    Raises: NotImplementedError naming an argument that asks for something else than stage 3 over all ranks.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        **own: Any,
    ) -> None:
        if enabled:
            for name, value in (
                ("zero_param_parallel_group", zero_param_parallel_group),
                ("zero_quantized_weights", zero_quantized_weights),
                ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights),
                ("param_swapper", param_swapper),
            ):
                if value is not None and value is not False:
                    raise NotImplementedError(f"zero.Init({name}={value!r}) is not available; leave it out")
            for name, group in (
                ("data_parallel_group", data_parallel_group),
                ("sequence_data_parallel_group", sequence_data_parallel_group),
            ):
                if group is not None and not _is_of_all_ranks(group):
                    raise NotImplementedError(f"zero.Init({name}=) of some ranks is not available: all ranks shard")
            check_mpu(mpu, "zero.Init(mpu=)")
            if not torch.distributed.is_initialized():
                init_distributed()
        super().__init__(module, enabled=enabled, dtype=dtype, **own)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._enabled and not any(error) and not is_inside():
            gc.collect()  # modules in reference cycles: else ranks may list different parameters
            params = list(self._params())
            share_first_values(params)
            for param in params:
                parameter_views.number(param)


class MiCS_Init(Init):
    """``Init`` for a configuration with ``mics_shard_size``: each group of so many ranks will have a whole model.

    ``initialize`` with the same configuration divides the parameters in each group. config, config_dict_or_path: the
    configuration. Raises: ValueError if it lacks ``mics_shard_size``.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        sequence_data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **own: Any,
    ) -> None:
        source = config_dict_or_path if config is None else config
        if enabled and (source is None or load(source).zero_optimization.mics_shard_size < 1):
            raise ValueError(
                "zero.MiCS_Init() needs a configuration with zero_optimization.mics_shard_size, the number of ranks "
                "that have a whole model together; without it use zero.Init()"
            )
        super().__init__(
            module,
            data_parallel_group,
            enabled=enabled,
            dtype=dtype,
            mpu=mpu,
            sequence_data_parallel_group=sequence_data_parallel_group,
            **own,
        )


def _is_of_all_ranks(group: Any) -> bool:
    dist = torch.distributed
    return not isinstance(group, dist.ProcessGroup) or dist.get_world_size(group) == dist.get_world_size()


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
