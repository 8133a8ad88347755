"""The job's ranks as DeepSpeed's groups (``utils.groups``, ``utils.bwc``), and tests for experts.

All ranks form one data-parallel group; groups of other kinds have one rank. Sizes and ranks are known without a call
between ranks. The group itself is torch.distributed's default one, which ``init_distributed`` makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from zcomm.comm import job
from zcomm.compat.deepspeed.modules import refusing_function

mpu: Any = None
expert_parallel_size_ = 1


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Do nothing. Raises: NotImplementedError for groups of experts, and for mpu."""
    if ep_size != 1:
        raise NotImplementedError(f"groups.initialize(ep_size={ep_size}) is not available: there are no expert groups")
    if mpu is not None:
        raise NotImplementedError("groups.initialize(mpu=) is not available: ranks form one data-parallel group")


def _size() -> int:
    if job.is_initialized():
        return job.current().world_size
    return dist.get_world_size()


def _rank() -> int:
    return job.current().rank if job.is_initialized() else dist.get_rank()


def _group() -> dist.ProcessGroup:
    """Return torch.distributed's default group. Raises: RuntimeError if there is none."""
    if not dist.is_initialized():
        raise RuntimeError("there is no torch.distributed group: call deepspeed.init_distributed() first")
    group = dist.group.WORLD
    assert group is not None
    return group


def get_data_parallel_group() -> dist.ProcessGroup:
    """Return the group of all ranks. Raises: RuntimeError before ``init_distributed``."""
    return _group()


def get_data_parallel_world_size() -> int:
    """Return the number of ranks."""
    return _size()


def get_data_parallel_rank() -> int:
    """Return this rank."""
    return _rank()


def get_model_parallel_world_size() -> int:
    """Return 1."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0."""
    return 0


get_model_parallel_group = refusing_function("groups.get_model_parallel_group", "ranks form one data-parallel group")

get_tensor_model_parallel_world_size = get_model_parallel_world_size
get_tensor_model_parallel_rank = get_model_parallel_rank
get_tensor_model_parallel_src_rank = get_data_parallel_rank
get_tensor_model_parallel_group = get_model_parallel_group

# The names with an underscore are those that DeepSpeed's users call.
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_data_parallel_group = get_data_parallel_group
_get_sequence_data_parallel_world_size = get_data_parallel_world_size
_get_sequence_data_parallel_rank = get_data_parallel_rank
_get_sequence_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_rank = get_model_parallel_rank
_get_expert_model_parallel_world_size = get_model_parallel_world_size
_clone_world_group = get_data_parallel_group


def _get_data_parallel_group_ranks() -> list[int]:
    return list(range(_size()))


def _get_broadcast_src_rank() -> int:
    return 0


_get_sequence_parallel_group = refusing_function(
    "groups._get_sequence_parallel_group", "there is no sequence parallelism; ranks form one data-parallel group"
)


def _get_zero_param_intra_parallel_group() -> None:
    """Return None: parameters are sharded over all ranks."""


def _zero_param_parallel_is_initialized() -> bool:
    return False


_no_experts = refusing_function("groups of experts", "zcomm has no mixture of experts")
_get_max_expert_size = _get_max_expert_size_name = _get_max_expert_parallel_group = _no_experts
_get_expert_parallel_group = _get_expert_parallel_world_size = _get_expert_parallel_rank = _no_experts
_get_expert_data_parallel_group = _get_expert_data_parallel_world_size = _get_expert_data_parallel_rank = _no_experts
_get_expert_parallel_group_ranks = _get_expert_data_parallel_group_ranks = _no_experts
_get_expert_broadcast_src_rank = _get_expert_parallel_src_rank = _no_experts


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {}


# --- utils.bwc: sizes and ranks of groups that an mpu has, and those without one --------------------------------------


def _of(mpu: Any, names: tuple[str, ...], alone: int) -> int:
    for name in names:
        if mpu is not None and hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return alone


def bwc_tensor_model_parallel_rank(mpu: Any = None) -> int:
    """Return the rank among model-parallel ranks; 0 without an mpu."""
    return _of(mpu, ("get_tensor_model_parallel_rank", "get_slice_parallel_rank", "get_model_parallel_rank"), 0)


def bwc_tensor_model_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of model-parallel ranks; 1 without an mpu."""
    names = ("get_tensor_model_parallel_world_size", "get_slice_parallel_world_size", "get_model_parallel_world_size")
    return _of(mpu, names, 1)


def bwc_pipeline_parallel_world_size(mpu: Any = None) -> int:
    """Return the number of pipeline stages; 1 without an mpu."""
    return _of(mpu, ("get_pipeline_model_parallel_world_size", "get_pipe_parallel_world_size"), 1)


# --- moe.utils: tests for experts -------------------------------------------------------------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): deepspeed.moe.layer.MoE cannot be constructed."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Return True for a parameter that a program has marked as an expert's (``allreduce`` is False)."""
    return getattr(param, "allreduce", True) is False


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return True for a group that a program has marked so."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Sequence[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return the groups as a list, which is all that there is to do without experts. Their ``params`` become lists.

    Raises: ValueError if it is no dict, list or tuple; NotImplementedError for a parameter of an expert.
    """
    if not isinstance(param_groups, (dict, list, tuple)):
        raise ValueError(f"Unknown param group type of {type(param_groups)}: a dict, or a list of them, is expected")
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        for param in group["params"]:
            if is_moe_param(param):
                raise NotImplementedError(
                    f"a parameter of shape {tuple(param.shape)} has allreduce=False, an expert's: zcomm has no mixture "
                    "of experts; train without it"
                )
    return groups
