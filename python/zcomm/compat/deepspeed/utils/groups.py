"""``deepspeed.utils.groups``: the job's ranks as DeepSpeed's groups.

All ranks form one data-parallel group; groups of other kinds have one rank. Sizes and ranks are known without a call
between ranks. The group itself is torch.distributed's default one, which ``init_distributed`` makes.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zcomm.comm import job
from zcomm.compat.deepspeed import refused

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
    """Return torch.distributed's default group. Raises: RuntimeError where there is none."""
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


get_model_parallel_group = refused.function("groups.get_model_parallel_group", "ranks form one data-parallel group")

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


_get_sequence_parallel_group = refused.function(
    "groups._get_sequence_parallel_group", "there is no sequence parallelism; ranks form one data-parallel group"
)


def _get_zero_param_intra_parallel_group() -> None:
    """Return None: parameters are sharded over all ranks."""


def _zero_param_parallel_is_initialized() -> bool:
    return False


_no_experts = refused.function("groups of experts", "zcomm has no mixture of experts")
_get_max_expert_size = _get_max_expert_size_name = _get_max_expert_parallel_group = _no_experts
_get_expert_parallel_group = _get_expert_parallel_world_size = _get_expert_parallel_rank = _no_experts
_get_expert_data_parallel_group = _get_expert_data_parallel_world_size = _get_expert_data_parallel_rank = _no_experts
_get_expert_parallel_group_ranks = _get_expert_data_parallel_group_ranks = _no_experts
_get_expert_broadcast_src_rank = _get_expert_parallel_src_rank = _no_experts


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {}


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {}
