"""BucketLayout: positions of tensors in flat buckets, and the owner of each shard.

Invariants: every tensor and every rank's shard begin at a multiple of ``align`` elements, and a bucket's count divides
by ``world_size * align``. ``align`` is 64 elements: a cache line for every dtype, and the block of the gradient norm
(decision D3). So neither a tensor nor a shard ever cuts a block.
Pure arithmetic: no memory, no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Place of one tensor: ``count`` elements from ``offset`` in bucket ``bucket``."""

    bucket: int
    offset: int
    count: int
    shape: torch.Size


@dataclass(frozen=True)
class Bucket:
    """A flat buffer of ``count`` elements (padding included) that holds the tensors ``tensors`` (indices)."""

    index: int
    count: int
    tensors: tuple[int, ...]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class BucketLayout:
    """Layout of tensors, in the order given, in flat buckets of about ``bucket_nbytes``.

    tensors_or_shapes: tensors, or shapes (then ``itemsize`` gives the bytes per element).
    world_size: ranks that share each bucket; rank r owns elements [r * n, (r + 1) * n), n = count / world_size.
    bucket_nbytes: a bucket is closed before it grows past this; a larger tensor has its own bucket.
    align: elements; see the module's head.
    shard_align: elements, a multiple of ``align``; every shard's count is a multiple of it (None: ``align``).
    first_nbytes: the limit of the first bucket; each next limit is 4 times as large, up to bucket_nbytes (None:
    bucket_nbytes for all). Gradients arrive last bucket first, so no backward is left to hide the first bucket's.

    Raises: ValueError naming a world_size, bucket_nbytes, align, shard_align or first_nbytes below 1.
    Source: gradient bucketing of PyTorch DDP (Li et al., VLDB 2020); flat shards of ZeRO (arXiv:1910.02054).
    """

    def __init__(
        self,
        tensors_or_shapes: Sequence[torch.Tensor | Sequence[int]],
        world_size: int,
        bucket_nbytes: int = 25 * 2**20,
        align: int = ALIGN,
        itemsize: int = 4,
        first_nbytes: int | None = None,
        shard_align: int | None = None,
    ) -> None:
        limit = bucket_nbytes if first_nbytes is None else min(first_nbytes, bucket_nbytes)
        sizes_of = {"world_size": world_size, "bucket_nbytes": bucket_nbytes, "align": align, "first_nbytes": limit}
        sizes_of["shard_align"] = self._shard_align = align if shard_align is None else shard_align
        for name, value in sizes_of.items():
            if value < 1:
                raise ValueError(f"BucketLayout: {name}={value} must be at least 1")
        if self._shard_align % align:
            raise ValueError(f"BucketLayout: shard_align={shard_align} must be a multiple of align={align}")
        self.world_size = world_size
        self.align = align
        shapes = [t.shape if isinstance(t, torch.Tensor) else torch.Size(t) for t in tensors_or_shapes]
        sizes = [t.element_size() if isinstance(t, torch.Tensor) else itemsize for t in tensors_or_shapes]
        self.slots: list[Slot] = []
        self.buckets: list[Bucket] = []
        members: list[int] = []
        used = 0
        for index, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            room = _round_up(shape.numel(), align)
            if members and (used + room) * size > limit:
                self._close(members, used)
                members, used, limit = [], 0, min(4 * limit, bucket_nbytes)
            self.slots.append(Slot(len(self.buckets), used, shape.numel(), shape))
            members.append(index)
            used += room
        if members:
            self._close(members, used)

    def _close(self, members: list[int], used: int) -> None:
        count = _round_up(max(used, 1), self.world_size * self._shard_align)
        self.buckets.append(Bucket(len(self.buckets), count, tuple(members)))

    @property
    def count(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.count for bucket in self.buckets)

    @property
    def tensor_count(self) -> int:
        """Elements of all tensors, without padding."""
        return sum(slot.count for slot in self.slots)

    def shard_count(self, bucket: int) -> int:
        """Return the number of elements of one rank's shard of ``bucket``."""
        return self.buckets[bucket].count // self.world_size

    def owner(self, tensor: int) -> list[int]:
        """Return the ranks that own a part of ``tensor``, ascending."""
        slot = self.slots[tensor]
        shard = self.shard_count(slot.bucket)
        last = max(slot.offset, slot.offset + slot.count - 1)
        return list(range(slot.offset // shard, last // shard + 1))

    def pieces(self, bucket: int, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``rank``'s part of each tensor: (tensor, begin in the tensor, begin in the shard, count)."""
        shard = self.shard_count(bucket)
        low, high = rank * shard, (rank + 1) * shard
        for index in self.buckets[bucket].tensors:
            slot = self.slots[index]
            begin, end = max(slot.offset, low), min(slot.offset + slot.count, high)
            if begin < end:
                yield index, begin - slot.offset, begin - low, end - begin

    def view(self, flat: torch.Tensor, tensor: int) -> torch.Tensor:
        """Return ``tensor``'s place in its bucket's flat buffer, in its own shape."""
        slot = self.slots[tensor]
        return flat[slot.offset : slot.offset + slot.count].view(slot.shape)
