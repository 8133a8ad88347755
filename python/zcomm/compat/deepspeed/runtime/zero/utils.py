"""``deepspeed.runtime.zero.utils``: which optimizers are supported, and helpers over tensors in containers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zcomm import optim
from zcomm.comm import job

ZERO_SUPPORTED_OPTIMIZERS: list[type] = [
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.SGD,
    optim.CPUAdam,
    optim.CPUAdagrad,
    optim.CPULion,
    optim.FusedAdam,
]


class ZeRORuntimeException(Exception):
    """DeepSpeed's error; zcomm raises ValueError and RuntimeError instead."""


def is_zero_supported_optimizer(optimizer: object) -> bool:
    """Return True if zcomm has a fused update for this class. (Other elementwise ones run, too.)"""
    return type(optimizer) in ZERO_SUPPORTED_OPTIMIZERS


def is_zero_param(parameter: object) -> bool:
    """Return True for a parameter that stage 3 shards."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def is_builtin_type(obj: object) -> bool:
    """Return True for an instance of a class of ``builtins``."""
    return type(obj).__module__ == "builtins"


def isinstance_namedtuple(obj: object) -> bool:
    """Return True for an instance of a namedtuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_asdict") and hasattr(obj, "_fields")


def apply_to_tensors_only(
    function: Callable[[torch.Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """Return ``value`` with each tensor in its lists, tuples and dicts replaced by ``function`` of it.

    Dicts are changed in place, as in DeepSpeed. warning_msg_fn: not called; other objects pass through.
    """
    if isinstance(value, (list, tuple)):
        items = [apply_to_tensors_only(function, item) for item in value]
        return type(value)(*items) if isinstance_namedtuple(value) else type(value)(items)
    if isinstance(value, dict):
        for key in value:
            value[key] = apply_to_tensors_only(function, value[key])
        return value
    return function(value) if isinstance(value, torch.Tensor) else value


def get_mapping_to_flat_buffer(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int, int]]:
    """Return each tensor with its offset and its count of elements in a flat buffer of them all."""
    found, offset = [], 0
    for tensor in tensors:
        found.append((tensor, offset, tensor.numel()))
        offset += tensor.numel()
    return found


def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
    """Check that all ranks give the same numbers. Collective. Raises: RuntimeError on ranks that differ from rank 0."""
    comm = job.current()
    theirs = _of_rank_0(list(ints))
    if theirs != list(ints):
        raise RuntimeError(f"rank {comm.rank} has {ints}, rank 0 has {theirs}")


def assert_lst_len_same_as_other_ranks(lst: list[Any]) -> None:
    """Check that all ranks give a list of one length. Collective. Raises: as ``assert_ints_same_as_other_ranks``."""
    assert_ints_same_as_other_ranks([len(lst)])


def _of_rank_0(ints: list[int]) -> list[int]:
    comm = job.current()
    count = torch.tensor([len(ints)])
    comm.broadcast(count, root=0, name="count of numbers")
    numbers = torch.tensor(ints if comm.rank == 0 else [0] * int(count), dtype=torch.int64)
    if int(count):
        comm.broadcast(numbers, root=0, name="numbers")
    return [int(number) for number in numbers]
