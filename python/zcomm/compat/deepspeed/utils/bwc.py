"""``deepspeed.utils.bwc``: sizes and ranks of groups that an ``mpu`` has, and those without one."""

from __future__ import annotations

from typing import Any


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
