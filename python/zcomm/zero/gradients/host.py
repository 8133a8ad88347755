"""Gradients in host memory: hooks write into a ring of slots, from which each bucket is reduced by a reduce_scatter.

[Note: slots] Bucket number i of the launch order uses slot i % count, once the bucket that used it before has been
reduced.
[Note: own gradients] Other ranks read their shards of a slot; only its rank reads its own shard. So a gradient with at
least half of it in this rank's shard stays in autograd's memory until its bucket has been reduced. Only the other
ranks' elements are copied. The bits are the same as after copying all, because the order of ranks is the same. Only
plain tensors with memory of their own are kept: a view of another tensor's gradient may be written to, or keep more
memory alive. Memory: of each bucket in flight up to twice the shard.
A launch takes time from backward, and after a matrix product it finds the caches cold: each object that it does not
touch counts. So the arguments of a bucket's reduce_scatter, views and padding are built once.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.zero.gradients.across import AcrossGroups
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, SlotTransport
from zcomm.zero.layout.flat import FlatBucket, Geometry, Place

_Spans = list[tuple[int, int]]  # address, elements


class Slots:
    """A ring of equal slots for ``buckets`` in launch order. number: of each bucket's slot, by bucket."""

    def __init__(self, geometry: Geometry, buckets: Sequence[FlatBucket], memory: list[torch.Tensor]) -> None:
        self._geometry = geometry
        self.memory = memory
        self._views: dict[int, torch.Tensor] = {}  # of parameters
        self._gaps: dict[int, list[torch.Tensor]] = {}  # by bucket
        self.arrange(buckets)

    def arrange(self, buckets: Sequence[FlatBucket]) -> None:
        """Assign slots to the buckets by their position in the launch order. No slot is in use."""
        self.number = {bucket.index: turn % len(self.memory) for turn, bucket in enumerate(buckets)}
        self._views.clear()
        self._gaps.clear()

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.memory)

    def of(self, bucket: FlatBucket) -> torch.Tensor:
        return self.memory[self.number[bucket.index]][: bucket.count]

    def view(self, index: int) -> torch.Tensor:
        """Return the place of parameter ``index`` in its slot."""
        view = self._views.get(index)
        if view is None:
            slot = self.of(self._geometry.bucket_of(index))
            view = self._views[index] = self._geometry.view(slot, index)
        return view

    def pad(self, bucket: FlatBucket) -> None:
        """Write zeros between the bucket's parameters and behind them."""
        gaps = self._gaps.get(bucket.index)
        if gaps is None:
            slot = self.of(bucket)
            gaps = self._gaps[bucket.index] = [slot[gap] for gap in self._geometry.gaps(bucket)]
        for gap in gaps:
            gap.zero_()

    def close(self) -> None:
        self._views.clear()
        self._gaps.clear()
        self.memory.clear()


def shared_slots(plan: ReducePlan, buckets: Sequence[FlatBucket], count: int) -> Slots:
    """Return a ring that the ranks of the plan's communicator reach. Memory: ``count`` x largest bucket x itemsize."""
    largest = max((bucket.count for bucket in buckets), default=0)
    return Slots(plan.geometry, buckets, [plan.comm.empty(largest, plan.dtype) for _ in range(count)])


def stays(place: Place, shard: slice) -> bool:
    """Return True if a gradient stays in autograd's memory: at least half of it is in this rank's shard."""
    low, high = place.within(shard)
    return 2 * (high - low) >= place.count > 0


_OwnSpan = tuple[int, int, int]  # begin and count in the shard, address


class _Cut(NamedTuple):
    """Elements [begin, end) of a gradient, which begin the shard's element ``at``."""

    begin: int
    end: int
    at: int


class ZeroCopyGradients:
    """Gradients that stay in autograd's memory until they are reduced. dtype: of the slots; gradients of others are
    copied. keeps: False: all are copied."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, keeps: bool = True) -> None:
        self._dtype = dtype
        self._bucket_of = [place.bucket for place in geometry.places]
        self._cuts: dict[int, _Cut] = {}
        for bucket in geometry.buckets if keeps else ():
            shard = bucket.held
            for index in bucket.params:
                place = geometry.places[index]
                if stays(place, shard):
                    low, high = place.within(shard)
                    self._cuts[index] = _Cut(low - place.offset, high - place.offset, low - shard.start)
        self._kept: dict[int, list[tuple[_OwnSpan, torch.Tensor]]] = {}  # by bucket

    def keep(self, index: int, grad: torch.Tensor, view: torch.Tensor) -> bool:
        """Keep the gradient of parameter ``index``, after copying the other ranks' elements to its place ``view``.
        False: it must be copied whole."""
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

    def take(self, bucket: int) -> tuple[list[_OwnSpan], list[torch.Tensor]]:
        """Return the spans of the bucket's kept elements, in order, and the tensors that must live until they are
        reduced."""
        kept = self._kept.pop(bucket, [])
        return sorted(span for span, _ in kept), [grad for _, grad in kept]

    def forget(self) -> None:
        """Drop the kept gradients: they will not be reduced."""
        self._kept.clear()


_storage_users = getattr(torch._C, "_storage_Use_Count", None)


def is_plain(grad: torch.Tensor) -> bool:
    """Return True if its memory holds its elements in order, and no other tensor's."""
    if type(grad) is not torch.Tensor or not grad.is_contiguous() or grad.requires_grad:
        return False
    if grad.is_neg() or grad._is_zerotensor() or _storage_users is None:
        return False
    storage = grad.untyped_storage()
    users: int = _storage_users(storage._cdata)
    return storage.nbytes() == grad.nbytes and users <= 2  # of the tensor, and of ``storage``


class _Call(NamedTuple):
    """Arguments of a bucket's reduce_scatter, and the tensors that they have the addresses of."""

    spans: tuple[_Spans, _Spans, _core.DType, _core.ReduceOp, _core.DType]
    name: str
    alive: tuple[torch.Tensor, ...]


class HostTransport(SlotTransport):
    """Transport of buckets with slots and accumulators in host memory.

    keeps: gradients may stay in autograd's memory. private: allocates the accumulators, which no other rank reads.
    sums: see Transport. Memory: slots, and accumulators of 4 bytes per element kept.
    """

    tier = "device"  # on the CPU the device is host memory

    def __init__(
        self,
        plan: ReducePlan,
        buckets: Sequence[FlatBucket],
        slots: Slots,
        keeps: bool = False,
        private: Callable[[int], torch.Tensor] = torch.zeros,
        sums: dict[int, torch.Tensor] | None = None,
    ) -> None:
        kept = 0 if sums is not None else sum(bucket.held_count for bucket in buckets)
        super().__init__(plan, buckets, private(kept), sums)
        self.slots = slots
        self.codec = plan.shard_codec(buckets, self._finish_bucket)
        keeps = keeps and self.codec is None  # all elements are encoded
        self._own = ZeroCopyGradients(plan.geometry, plan.dtype, keeps)
        self.keeps = keeps
        self._bucket_of = [place.bucket for place in plan.geometry.places]
        if plan.comms.hops:
            outer = plan.across_codec(buckets, self._finish_bucket)
            self.across = AcrossGroups(plan.comms, buckets, len(slots.memory), outer)
        self._order = {"order": _core.ReduceOrder.rank} if plan.comms.hops else {}
        self.open_slots(len(slots.memory))
        self._calls: dict[tuple[int, bool], _Call] = {}  # by bucket, and whether its sum is staged

    @property
    def number(self) -> Mapping[int, int]:
        return self.slots.number

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        super().arrange(order)
        self.slots.arrange(self.buckets)
        self._calls.clear()
        self._holder = [-1] * len(self._holder)

    def slot(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the memory that ``reduce`` reads, [bucket.count]."""
        return self.slots.of(bucket)

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        number = self.slots.number[self._bucket_of[index]]
        if self._works[number] is not None:
            self.wait(number)
        view = self.slots.view(index)
        if grad is None:
            view.zero_()
        elif not self._own.keep(index, grad, view):
            view.copy_(grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        self.wait(self.slots.number[bucket.index])
        self.slots.pad(bucket)
        self.moved_nbytes += bucket.count * self.plan.dtype.itemsize
        self.reduce(bucket, accumulate)

    def reduce(self, bucket: FlatBucket, accumulate: bool) -> None:
        """Reduce a bucket as ``start`` does, also one with padding in its slot."""
        staged = self.across.staged
        call = self._calls.get((bucket.index, staged))
        if call is None:
            call = self._calls[bucket.index, staged] = self._call(bucket)
        spans, kept = self._own.take(bucket.index)
        core, adds = self.plan.comm._core, accumulate and not staged
        if self.codec is not None:
            work = core.reduce_scatter(*call.spans, adds, call.name, True, self.codec.coding(bucket))
        elif spans:
            work = core.reduce_scatter(*call.spans, adds, spans, call.name, True, **self._order)
        else:
            work = core.reduce_scatter(*call.spans, adds, call.name, True, **self._order)
        assert work is not None  # it was asynchronous
        number = self.slots.number[bucket.index]
        self._holder[number] = bucket.index
        mine = Work(work, (call.alive, kept))
        self._works[number] = self.across.follow(mine, call.alive[1], self.sums[bucket.index], call.name, bucket)

    def _call(self, bucket: FlatBucket) -> _Call:
        slot, out = self.slot(bucket), self.sums[bucket.index]
        op = _core.ReduceOp.sum if self.across.hops else _core.ReduceOp.avg
        if self.across.staged:
            out = self.across.slot(self.slots.number[bucket.index], bucket)
        spans = [(slot.data_ptr(), slot.numel())], [(out.data_ptr(), out.numel())]
        form = (core_dtype(self.plan.dtype), op, _core.DType.float32)
        return _Call((*spans, *form), f"gradients of bucket {bucket.index}", (slot, out))

    def _finish_bucket(self, index: int) -> None:
        self.finish(self.plan.geometry.buckets[index])

    def _ended(self, number: int) -> None:
        for errors in self.errors:
            errors.ended(self._holder[number])
        super()._ended(number)

    def forget(self) -> None:
        self._own.forget()
        self.across.torn = False

    @property
    def nbytes(self) -> list[Nbytes]:
        return [
            (self.tier, "gradients", self.flat.nbytes),
            (self.tier, "slots", self.slots_nbytes),
            *self.error_nbytes,
        ]

    @property
    def error_nbytes(self) -> list[Nbytes]:
        return [each for errors in self.errors for each in errors.nbytes(self.tier)]

    @property
    def slots_nbytes(self) -> int:
        return self.slots.nbytes + self.across.nbytes

    def close(self) -> None:
        super().close()
        self._calls.clear()
        self.across.close()
        if self.codec is not None:
            self.codec.close()
        self.slots.close()
