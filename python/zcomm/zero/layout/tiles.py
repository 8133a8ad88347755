"""The form of a state tile: the data of each weight of a shard, and its order.

[Note: state tile] A tile holds, back to back, the optimizer's arrays in the kernel's order and data that make the
weight an exact fp32 master. The arrays are fp32, bf16, or 8-bit codes with their scales before them. A master needs
nothing more (fp32), ``remainder`` int16 (bf16, the split master of include/zcomm/optim_shard.hpp) or ``master`` fp32
(fp16). Tiles of a shard follow each other; the last one is shorter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.optim.fused import STATE_BLOCK

TILE_COUNT = 65536  # elements of a tile
Coded = dict[str, torch.Tensor]  # 8-bit state: the codes of each array, and "scales" (fp32, [blocks, arrays])


def cut(count: int, tiles: int = 1) -> Iterator[slice]:
    """Yield slices of a shard of ``count`` elements, ``tiles`` tiles at a time."""
    step = tiles * TILE_COUNT
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def cut_between(begin: int, end: int, count: int) -> Iterator[slice]:
    """Yield the tiles of a shard of ``count`` elements that have some of [begin, end)."""
    for first in range(begin // TILE_COUNT * TILE_COUNT, end, TILE_COUNT):
        yield slice(first, min(first + TILE_COUNT, count))


def core_shard(
    weight: torch.Tensor,
    grad: torch.Tensor,
    state: torch.Tensor,
    begin: int,
    end: int,
    state_dtype: torch.dtype = torch.float32,
    first_index: int = 0,
    addend: torch.Tensor | None = None,
) -> _core.OptimShard:
    """Return elements [begin, end) of a tile, or of a whole shard, as the kernels take them; ``state`` is flat uint8.

    first_index: of element 0, modulo 2^64 (stochastic rounding of bf16 state depends on step and index). addend: see
    TilePart.
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
        addend=0 if addend is None else addend.data_ptr(),
        addend_dtype=core_dtype(torch.float32 if addend is None else addend.dtype),
    )


@dataclass(frozen=True)
class TilePart:
    """Elements [begin, end) of a tile, or of all tiles of a shard, that a rule updates.

    ``weight`` and ``grad`` have its count, ``state`` is flat uint8. ``grad`` is fp32, or bf16 or fp16 if the rule
    ``takes_half``. ``at``: its first element in its shard. ``squares``: the sum that the gradient's squares are added
    to in the same pass, if any. ``addend``: the gradient's second term next to an fp32 ``grad``, if the rule
    ``takes_half`` ([Note: last pass]).
    """

    weight: torch.Tensor
    grad: torch.Tensor
    state: torch.Tensor
    begin: int
    end: int
    at: int
    squares: _core.ExactSum | None = None
    addend: torch.Tensor | None = None


@dataclass(frozen=True)
class TileForm:
    """Names and dtype of the ``arrays``, and the ``dtype`` of the weights; see [Note: state tile]."""

    arrays: tuple[str, ...]
    dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32

    @property
    def coded(self) -> bool:
        """True if the arrays are 8-bit codes: Adam's, with scales by STATE_BLOCK elements."""
        return self.state_dtype == torch.uint8

    def _scales_nbytes(self, count: int) -> int:
        return 4 * len(self.arrays) * -(-count // STATE_BLOCK) if self.coded else 0

    @property
    def element_nbytes(self) -> int:
        """Bytes of an element, without scales."""
        return self.state_dtype.itemsize * len(self.arrays) + self._low_nbytes

    @property
    def _low_nbytes(self) -> int:
        """Bytes of an element behind the arrays: bf16's remainder or fp16's master."""
        return {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4}[self.dtype]

    def nbytes(self, count: int) -> int:
        return self.element_nbytes * count + self._scales_nbytes(count)

    def array(self, state: torch.Tensor, count: int, name: str) -> torch.Tensor:
        """Return the array ``name`` of one tile, without a copy: codes if the state is coded; fp16's "master" is
        fp32."""
        if name == "master":
            return self._low(state, count).view(torch.float32)
        size = self.state_dtype.itemsize * count
        begin = self._scales_nbytes(count) + self.arrays.index(name) * size
        return state[begin : begin + size].view(self.state_dtype)

    def codes(self, state: torch.Tensor, count: int, part: slice) -> Coded:
        """Return 8-bit state of elements ``part`` of a tile, without a copy. part: begins at a block."""
        blocks = slice(part.start // STATE_BLOCK, -(-part.stop // STATE_BLOCK))
        scales = state[: self._scales_nbytes(count)].view(torch.float32).view(-1, len(self.arrays))
        return {"scales": scales[blocks]} | {name: self.array(state, count, name)[part] for name in self.arrays}

    def master(self, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return the exact fp32 master of one tile: a view of it, or a copy if it is split. If the program has changed
        the weight, the weight is the master."""
        if self.dtype == torch.float32:
            return weight
        if self.dtype == torch.float16:
            return _with_edits(self.array(state, weight.numel(), "master"), weight)
        if not weight.is_cpu:
            return joined(weight, self._low(state, weight.numel()).view(torch.int16))
        master = torch.empty(weight.numel())
        _core.join_master(self._split(weight, state, master), master.data_ptr(), 0)
        return master

    def part_master(self, weight: torch.Tensor, state: torch.Tensor, inside: slice) -> torch.Tensor:
        """Return ``master`` of only the elements ``inside`` of one tile."""
        if self.dtype == torch.float32:
            return weight[inside]
        if self.dtype == torch.float16:
            return _with_edits(self.array(state, weight.numel(), "master")[inside], weight[inside])
        return joined(weight[inside], self._low(state, weight.numel()).view(torch.int16)[inside])

    def set_part_master(self, weight: torch.Tensor, state: torch.Tensor, inside: slice, master: torch.Tensor) -> None:
        """Store a changed result of ``part_master``."""
        if self.dtype == torch.float16:
            weight[inside].copy_(master)
        elif self.dtype == torch.bfloat16:
            high, low = split(master)
            weight[inside].copy_(high)
            self._low(state, weight.numel()).view(torch.int16)[inside].copy_(low)

    def _split(self, weight: torch.Tensor, state: torch.Tensor, master: torch.Tensor) -> _core.OptimShard:
        """Return a core shard of only a bf16 weight and its remainder, however many arrays lie before it."""
        return core_shard(weight, master, self._low(state, weight.numel()), 0, weight.numel())

    def _low(self, state: torch.Tensor, count: int) -> torch.Tensor:
        """Return the data behind the arrays: bf16's remainder or fp16's master."""
        return state[self._scales_nbytes(count) + self.state_dtype.itemsize * len(self.arrays) * count :]

    def reordered(self, state: torch.Tensor, count: int, master_first: bool) -> torch.Tensor:
        """Copy a tile of fp16 weights with its master first, as the core has it, or last."""
        middle = self.nbytes(count) - 4 * count if master_first else 4 * count
        return torch.cat((state[middle:], state[:middle]))

    def extend(self, before: TileForm, source: torch.Tensor, target: torch.Tensor, master_first: bool) -> None:
        """Copy a tile of form ``before``, which lacks the last arrays, to a tile of this form. These begin as zeros."""
        kept = source.numel()
        if kept and not master_first:
            kept -= kept // before.element_nbytes * self._low_nbytes
        target.zero_()
        target[:kept].copy_(source[:kept])
        target[target.numel() - (source.numel() - kept) :].copy_(source[kept:])

    def set_master(self, weight: torch.Tensor, state: torch.Tensor, master: torch.Tensor) -> None:
        """Keep ``master`` (fp32, contiguous) exactly, and its rounded value as the weight of one tile."""
        if self.dtype == torch.bfloat16 and not weight.is_cpu:
            high, low = split(master)
            weight.copy_(high)
            self._low(state, weight.numel()).view(torch.int16).copy_(low)
            return
        if self.dtype == torch.bfloat16:
            _core.split_master(self._split(weight, state, master), master.data_ptr(), 0)
            return
        weight.copy_(master)
        if self.dtype == torch.float16:
            self.array(state, weight.numel(), "master").copy_(master)


def _with_edits(master: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``master``, in which ``weight`` (fp16) replaces elements that do not round to it."""
    here, rounded = weight.view(torch.int16), master.to(torch.float16).view(torch.int16)
    if not torch.equal(here, rounded):
        torch.where(here == rounded, master, weight.to(torch.float32), out=master)
    return master


def joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Compute the core's join_master on a device's memory."""
    high = weight.view(torch.int16).to(torch.int32) << 16
    master = (high + low.to(torch.int32)).view(torch.float32)
    return torch.where(master.isnan(), high.view(torch.float32), master)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the core's split_master on a device's memory: bf16 weight and int16 remainder."""
    bits, nan = master.view(torch.int32), torch.isnan(master)
    high = torch.where(nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return high.to(torch.int16).view(torch.bfloat16), torch.where(nan, 0, bits).to(torch.int16)


def _alone(count: int) -> tuple[torch.Tensor, Coded, torch.Tensor, torch.Tensor, _core.OptimShard]:
    """Return 8-bit state of ``count`` elements in memory of its own, two fp32 arrays, and their core shard."""
    form = TileForm(("exp_avg", "exp_avg_sq"), torch.float32, torch.uint8)
    state, first, second = torch.zeros(form.nbytes(count), dtype=torch.uint8), torch.empty(count), torch.empty(count)
    shard = core_shard(first, second, state, 0, count, torch.uint8)
    return state, form.codes(state, count, slice(0, count)), first, second, shard


def decoded(coded: Coded) -> dict[str, torch.Tensor]:
    """Decode the fp32 arrays that 8-bit state of Adam stands for."""
    state, mine, first, second, shard = _alone(coded["exp_avg"].numel())
    for name, value in mine.items():
        value.copy_(coded[name].reshape(value.shape))
    _core.adam_decode_state(shard, first.data_ptr(), second.data_ptr())
    del state  # until here
    return {"exp_avg": first, "exp_avg_sq": second}


def encoded(arrays: dict[str, torch.Tensor]) -> Coded:
    """Encode fp32 arrays of Adam as 8-bit state, to nearest; from the first element on, block by block."""
    _, mine, first, second, shard = _alone(arrays["exp_avg"].numel())
    first.copy_(arrays["exp_avg"].reshape(-1))
    second.copy_(arrays["exp_avg_sq"].reshape(-1))
    _core.adam_encode_state(shard, first.data_ptr(), second.data_ptr())
    return mine
