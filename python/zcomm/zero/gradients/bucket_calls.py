"""Bucket calls: what is the same each time that a bucket is reduced is made once.

A launch takes time from backward, and after a matrix product it finds the caches cold: each object that it does not
touch counts.

Invariant: a bucket is always padded in one slot, and always reduced from one slot to one shard.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.zero.gradients.kept import OwnGradients
from zcomm.zero.layout.flat import FlatBucket, Geometry

_Spans = list[tuple[int, int]]  # address, elements


class _Call(NamedTuple):
    what: tuple[_Spans, _Spans, _core.DType, _core.ReduceOp, _core.DType]
    name: str
    alive: tuple[torch.Tensor, ...]  # what the spans are of


class BucketCalls:
    """dtype: of the slots. Sums are averages in fp32."""

    def __init__(self, geometry: Geometry, comm: Communicator, dtype: torch.dtype) -> None:
        self._geometry = geometry
        self._comm = comm
        self._dtype = dtype
        self._gaps: dict[int, list[torch.Tensor]] = {}  # by bucket, in its slot
        self._calls: dict[int, _Call] = {}

    def pad(self, bucket: FlatBucket, slot: torch.Tensor) -> None:
        """Zeros between its parameters and behind them."""
        gaps = self._gaps.get(bucket.index)
        if gaps is None:
            gaps = self._gaps[bucket.index] = [slot[gap] for gap in self._geometry.gaps(bucket)]
        for gap in gaps:
            gap.zero_()

    def start(
        self,
        bucket: FlatBucket,
        slot: torch.Tensor,
        shard_of: Callable[[FlatBucket], torch.Tensor],
        accumulate: bool,
        own: OwnGradients | None,
    ) -> Work:
        """Start to reduce what is in ``slot`` (symmetric memory), and what ``own`` has kept, to this rank's shard."""
        call = self._calls.get(bucket.index)
        if call is None:
            call = self._calls[bucket.index] = self._call(bucket, slot, shard_of(bucket))
        spans, kept = own.take(bucket.index) if own is not None else ([], [])
        core, how = self._comm._core, (call.name, True)
        if spans:
            work = core.reduce_scatter(*call.what, accumulate, spans, *how)
        else:
            work = core.reduce_scatter(*call.what, accumulate, *how)
        assert work is not None  # it was asynchronous
        return Work(work, (call.alive, kept))

    def _call(self, bucket: FlatBucket, slot: torch.Tensor, shard: torch.Tensor) -> _Call:
        spans = [(slot.data_ptr(), slot.numel())], [(shard.data_ptr(), shard.numel())]
        what = (*spans, core_dtype(self._dtype), _core.ReduceOp.avg, _core.DType.float32)
        return _Call(what, f"gradients of bucket {bucket.index}", (slot, shard))

    def forget(self) -> None:
        """Slots and accumulators are given back."""
        self._gaps.clear()
        self._calls.clear()
