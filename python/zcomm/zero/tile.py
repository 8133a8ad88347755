"""The form of a state tile: what lies beside each weight of a shard, and in which order.

[Note: state tile] A tile holds, back to back, the optimizer's arrays (fp32 or bf16) in the kernel's order and what
makes the weight an exact fp32 master: nothing (fp32), ``remainder`` int16 (bf16, the split master of include/zcomm/
optim_shard.hpp), ``master`` fp32 (fp16). Tiles of a shard follow each other; the last one is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm._tensors import core_dtype

TILE_COUNT = 65536  # elements of a tile


def cut(count: int, tiles: int = 1) -> Iterator[slice]:
    """A shard of ``count`` elements, ``tiles`` tiles at a time."""
    step = tiles * TILE_COUNT
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def core_shard(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: torch.Tensor,
    begin: int,
    end: int,
    state_dtype: torch.dtype = torch.float32,
    first_index: int = 0,
) -> _core.OptimShard:
    """Elements [begin, end) of a tile, or of a whole shard, as the kernels take them; ``state`` is flat uint8.

    first_index: of element 0, modulo 2^64 (bf16 state is rounded by chance that follows from step and index).
    """
    return _core.OptimShard(
        weight=weight.data_ptr(),
        weight_dtype=core_dtype(weight.dtype),
        grad=grad.data_ptr(),
        grad_dtype=core_dtype(grad.dtype),
        state=state.data_ptr(),
        count=weight.numel(),
        tile_count=TILE_COUNT,
        begin=begin,
        end=end,
        state_dtype=core_dtype(state_dtype),
        first_index=first_index % 2**64,
    )


@dataclass(frozen=True)
class TileForm:
    """Names and dtype of the ``arrays``, and the ``dtype`` of the weights; see [Note: state tile]."""

    arrays: tuple[str, ...]
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32

    @property
    def element_nbytes(self) -> int:
        return (
            self.state_dtype.itemsize * len(self.arrays)
            + {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}[self.dtype]
        )

    def nbytes(self, count: int) -> int:
        return self.element_nbytes * count

    def array(self, state: torch.Tensor, count: int, name: str) -> torch.Tensor:
        """The array ``name`` (or fp16's "master", fp32) of one tile, without a copy."""
        size = self.state_dtype.itemsize * count
        if name == "master":
            return state[len(self.arrays) * size :].view(torch.float32)
        begin = self.arrays.index(name) * size
        return state[begin : begin + size].view(self.state_dtype)

    def master(self, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The exact fp32 master of one tile: a view of it, or a copy where it is split."""
        if self.dtype == torch.float32:
            return weight
        if self.dtype == torch.float16:
            return self.array(state, weight.numel(), "master")
        master = torch.empty(weight.numel())
        _core.join_master(self._split(weight, state, master), master.data_ptr(), 0)
        return master

    def _split(self, weight: torch.Tensor, state: torch.Tensor, master: torch.Tensor) -> _core.OptimShard:
        """A bf16 weight and its remainder alone, however many arrays lie before it."""
        low = state[self.state_dtype.itemsize * len(self.arrays) * weight.numel() :]
        return core_shard(weight, master, low, 0, weight.numel())

    def set_master(self, weight: torch.Tensor, state: torch.Tensor, master: torch.Tensor) -> None:
        """Keep ``master`` (fp32, contiguous) exactly, and its rounded value as the weight of one tile."""
        if self.dtype == torch.bfloat16:
            _core.split_master(self._split(weight, state, master), master.data_ptr(), 0)
            return
        weight.copy_(master)
        if self.dtype == torch.float16:
            self.array(state, weight.numel(), "master").copy_(master)
