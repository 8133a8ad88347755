"""Own gradients: what this rank reduces itself is read from where autograd put it, not from the bucket's slot.

A slot is for the other ranks: they read their shards of it, and its rank alone reads its own shard. So a gradient
that lies in this rank's shard, or half of it at least, stays alive until its bucket has been reduced, and only what
others read of it is copied. The bits are those of copying all (the order of ranks is the same).
Kept are only plain tensors with memory of their own (a view of another tensor's gradient may be written to, or
keep more alive than itself).
Memory: of each bucket in flight up to twice the shard, in autograd's own gradients.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from zcomm.zero.layout.flat import Geometry

_Span = tuple[int, int, int]  # begin and count in the shard, address


class _Cut(NamedTuple):
    """Elements [begin, end) of a gradient, which begin the shard's element ``at``."""

    begin: int
    end: int
    at: int


class OwnGradients:
    """The gradients that stay where autograd put them until they are reduced. dtype: of the slots; gradients of others
    are copied."""

    def __init__(self, geometry: Geometry, rank: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._bucket_of = [place.bucket for place in geometry.places]
        self._cuts: dict[int, _Cut] = {}
        for bucket in geometry.buckets:
            shard = bucket.shard(rank)
            for index in bucket.params:
                place = geometry.places[index]
                low, high = max(place.offset, shard.start), min(place.offset + place.count, shard.stop)
                if 2 * (high - low) >= place.count > 0:
                    self._cuts[index] = _Cut(low - place.offset, high - place.offset, low - shard.start)
        self._kept: dict[int, list[tuple[_Span, torch.Tensor]]] = {}  # by bucket

    def keep(self, index: int, grad: torch.Tensor, view: torch.Tensor) -> bool:
        """Keep the gradient of parameter ``index``, after copying what is not this rank's to its place ``view``. False:
        it must be copied whole."""
        cut = self._cuts.get(index)
        if cut is None or grad.dtype != self._dtype or not is_plain(grad):
            return False
        if cut.end - cut.begin < grad.numel():
            here, there = grad.view(-1), view.view(-1)
            there[: cut.begin].copy_(here[: cut.begin])
            there[cut.end :].copy_(here[cut.end :])
        span = (cut.at, cut.end - cut.begin, grad.data_ptr() + cut.begin * self._dtype.itemsize)
        self._kept.setdefault(self._bucket_of[index], []).append((span, grad))
        return True

    def take(self, bucket: int) -> tuple[list[_Span], list[torch.Tensor]]:
        """Return where the bucket's own elements are that were kept, in order, and what must live until they are
        reduced."""
        kept = self._kept.pop(bucket, [])
        return sorted(span for span, _ in kept), [grad for _, grad in kept]

    def forget(self) -> None:
        """Drop what was kept: it will not be reduced."""
        self._kept.clear()


_storage_users = getattr(torch._C, "_storage_Use_Count", None)


def is_plain(grad: torch.Tensor) -> bool:
    """Return True if its memory holds its elements in order, and is its alone."""
    if type(grad) is not torch.Tensor or not grad.is_contiguous() or grad.requires_grad:
        return False
    if grad.is_neg() or grad._is_zerotensor() or _storage_users is None:
        return False
    storage = grad.untyped_storage()
    users: int = _storage_users(storage._cdata)
    return storage.nbytes() == grad.nbytes and users <= 2  # the tensor's, and of the object that was asked
