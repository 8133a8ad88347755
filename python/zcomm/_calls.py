"""What every operation of a communicator does with its arguments and its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from zcomm import _core
from zcomm._tensors import check_buffers, core_dtype
from zcomm._work import Work

Buckets = torch.Tensor | Sequence[torch.Tensor]
Result = TypeVar("Result")


def listed(buckets: Buckets) -> list[torch.Tensor]:
    """One tensor is a list of one."""
    return [buckets] if isinstance(buckets, torch.Tensor) else list(buckets)


_REDUCE_OPS: dict[str, _core.ReduceOp] = dict(_core.ReduceOp.__members__)


def reduce_op(op: str) -> _core.ReduceOp:
    """The core's name of a reduction. Raises: ValueError naming one that it has not."""
    try:
        return _REDUCE_OPS[op]
    except (KeyError, TypeError):
        raise ValueError(f"op={op!r} is not a reduction; use one of {', '.join(_REDUCE_OPS)}") from None


class Calls:
    """The core communicator behind the operations, and their common ends."""

    rank: int
    world_size: int

    def __init__(self, core: _core.Communicator, device: str = "cpu") -> None:
        self._core = core  # _core.Communicator, or what speaks like it (backend "mpi")
        self._device = device  # where its tensors must be
        self._reads_tensors = device == "cpu" and hasattr(core, "all_reduce_tensor")

    def _buffers(self, what: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
        """The one dtype of ``tensors``, which the core may read when this returns. Raises: as check_buffers."""
        dtype = check_buffers(what, tensors, self._device)
        if self._device != "cpu":  # the core's stream does not wait for torch's
            torch.cuda.current_stream(self._device).synchronize()
        return dtype

    def _check_root(self, what: str, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"{what}: root={root} is not a rank of a world of size {self.world_size}")

    def _check_counts(self, what: str, buckets: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        if len(buckets) != len(shards):
            raise ValueError(f"{what}: {len(buckets)} bucket(s) but {len(shards)} shard(s)")
        for index, (bucket, shard) in enumerate(zip(buckets, shards, strict=True)):
            if bucket.numel() != shard.numel() * self.world_size:
                raise ValueError(
                    f"{what}: bucket {index} has {bucket.numel()} elements, its shard {shard.numel()}; "
                    f"a shard is 1/{self.world_size} of its bucket"
                )

    def _check_same_dtype(self, what: str, side: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        other = self._buffers(f"{what} {side}", tensors)
        if other != dtype:
            raise ValueError(f"{what}: tensors are {dtype}, {side} is {other}")
        core_dtype(dtype)

    @staticmethod
    def _end(core_work: _core.Work | None, keep_alive: object) -> Work | None:
        """``core_work`` is None when the call was blocking."""
        return None if core_work is None else Work(core_work, keep_alive)

    @staticmethod
    def _end_with(result: Result, core_work: _core.Work | None, keep_alive: object) -> Result | tuple[Result, Work]:
        return result if core_work is None else (result, Work(core_work, keep_alive))
