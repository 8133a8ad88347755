"""Transports of buckets with their sums on a drive ([Note: sums on a drive] in sum_ring.py).

SwappedTransport reduces between ranks, out of slots as HostTransport does. SingleRankTransport is for a world of one
rank, and has no slots: gradients stay in autograd's memory until they are in the ring. Both are for a model on the CPU.
D2HSwappedTransport is for one on a device: through D2HTransport's slots into the ring.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.zero.gradients.host import HostTransport, is_plain, shared_slots
from zcomm.zero.gradients.pinned import D2HPath, D2HTransport
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, SlotTransport, slot_count
from zcomm.zero.layout.flat import FlatBucket


class _OnDrive(SlotTransport):
    """Sums in ``ring``. The sum of the next reduction is read while this one runs."""

    ring: SumRing

    def open_ring(self, ring: SumRing) -> None:
        self.ring = ring
        self._next = _following(self.buckets)
        self._ahead: int | None = None

    def look_ahead(self, bucket: FlatBucket, accumulate: bool) -> None:
        """Let ``release`` read the sum behind ``bucket``, if sums are added to."""
        self._ahead = self._next.get(bucket.index) if accumulate else None

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        super().arrange(order)
        self._next = _following(self.buckets)
        self._ahead = None

    def release(self) -> None:
        super().release()
        if self._ahead is not None and self._works[self.number[self._ahead]] is None:
            self.ring.expect(self._ahead)

    def wait_all(self) -> None:
        SlotTransport.finish_all(self)

    def finish_all(self) -> None:
        self.wait_all()
        self.ring.finish()

    def fill(self) -> None:
        self.ring.forget()


class SwappedTransport(_OnDrive, HostTransport):
    """Transport of several ranks. Memory: as HostTransport, with ``ring`` instead of the accumulators."""

    def __init__(self, plan: ReducePlan, slot_count: int, keeps: bool, ring: SumRing) -> None:
        super().__init__(plan, plan.order, shared_slots(plan, plan.order, slot_count), keeps, sums=ring.views)
        self.open_ring(ring)
        self.keeps = True  # ``release`` starts writes

    def open_ring(self, ring: SumRing) -> None:
        super().open_ring(ring)
        self._launched: deque[int] = deque()  # slots of the reductions that were not waited for, oldest first

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        self._wait_for_place(bucket)
        self.ring.take(bucket.index, accumulate)
        super().start(bucket, accumulate)
        self.look_ahead(bucket, accumulate)

    def reduce(self, bucket: FlatBucket, accumulate: bool) -> None:
        super().reduce(bucket, accumulate)
        self._launched.append(self.slots.number[bucket.index])

    def wait(self, number: int) -> None:
        """Wait for the reductions up to the one in slot ``number``. Sums are written in the order of launches, in which
        the drive reads ahead."""
        while number in self._launched:
            first = self._launched[0]
            super().wait(first)
            with self.ring.losing():
                self._launched.popleft()
                self.ring.store(self._holder[first])
        super().wait(number)

    def _wait_for_place(self, bucket: FlatBucket) -> None:
        """Wait until no reduction is in the slot of ``bucket``, nor in its buffer of the ring. These may have different
        buckets, depending on the launch order."""
        self.wait(self.slots.number[bucket.index])
        holder = self.ring.holder(bucket.index)
        if holder >= 0:
            self.finish(self.plan.geometry.buckets[holder])

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        self._wait_for_place(bucket)
        return self.ring.open(bucket.index, change)

    @property
    def nbytes(self) -> list[Nbytes]:
        return [(self.tier, "slots", self.slots_nbytes), *self.error_nbytes, *_nbytes_of(self.ring)]

    def close(self) -> None:
        super().close()
        self.ring.close()


class D2HSwappedTransport(SwappedTransport, D2HTransport):
    """Transport of buckets that leave a device. Memory: slots as SwappedTransport has them, pinned, and ``ring``."""

    def __init__(self, path: D2HPath, ring: SumRing) -> None:
        slots = shared_slots(path.plan, path.buckets, slot_count(len(path.buckets)))
        D2HTransport.__init__(self, path, slots, ring.views)
        self.open_ring(ring)
        self.keeps = True  # ``release`` starts writes


class SingleRankTransport(_OnDrive):
    """Transport of a world of one. Memory: ``ring``; a gradient that is not plain is copied until it is added."""

    keeps = True

    def __init__(self, plan: ReducePlan, ring: SumRing) -> None:
        super().__init__(plan, plan.order, torch.empty(0), sums=ring.views)
        self.open_ring(ring)
        self._bucket_of = [place.bucket for place in plan.geometry.places]
        self._grads: dict[int, dict[int, torch.Tensor | None]] = {}  # by bucket and parameter
        self._gaps = {
            bucket.index: [ring.views[bucket.index][gap] for gap in plan.geometry.gaps(bucket)] for bucket in plan.order
        }
        self.open_slots(max(ring.number.values(), default=-1) + 1)

    @property
    def number(self) -> Mapping[int, int]:
        return self.ring.number

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None and (grad.dtype != self.plan.dtype or not is_plain(grad)):
            grad = grad.to(self.plan.dtype, copy=True, memory_format=torch.contiguous_format)
        self._grads.setdefault(self._bucket_of[index], {})[index] = grad

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        self.wait_all()  # this one may wait long for its buffer, and gradients that have been added would stay alive
        number = self.number[bucket.index]
        self.ring.take(bucket.index, accumulate)
        grads, shard = self._grads.pop(bucket.index, {}), self.ring.views[bucket.index]
        if not accumulate:
            for gap in self._gaps[bucket.index]:
                gap.zero_()
        ins, outs = [], []
        for index in bucket.params:
            grad, place = grads.get(index), self.plan.geometry.view(shard, index)
            if grad is not None and grad.numel():
                ins.append((grad.data_ptr(), grad.numel()))
                outs.append((place.data_ptr(), place.numel()))
            elif not accumulate:
                place.zero_()
        self._holder[number] = bucket.index
        if ins:
            form = (core_dtype(self.plan.dtype), _core.ReduceOp.avg, _core.DType.float32)
            name = f"gradients of bucket {bucket.index}"
            work = self.plan.comm._core.reduce_scatter(ins, outs, *form, accumulate, name, True)
            assert work is not None  # it was asynchronous
            self._works[number] = Work(work, (shard, grads))
        else:
            self.ring.store(bucket.index)
        self.moved_nbytes += bucket.count * self.plan.dtype.itemsize
        self.look_ahead(bucket, accumulate)

    def _ended(self, number: int) -> None:
        with self.ring.losing():
            super()._ended(number)
            self.ring.store(self._holder[number])

    def forget(self) -> None:
        self._grads.clear()

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        self.wait(self.number[bucket.index])
        return self.ring.open(bucket.index, change)

    @property
    def nbytes(self) -> list[Nbytes]:
        return _nbytes_of(self.ring)

    def close(self) -> None:
        self._gaps.clear()
        super().close()
        self.ring.close()


def _following(order: Sequence[FlatBucket]) -> dict[int, int]:
    """Return the bucket that is launched after each."""
    return dict(pairwise(bucket.index for bucket in order))


def _nbytes_of(ring: SumRing) -> list[Nbytes]:
    return [("nvme", "gradients", ring.drive_nbytes), ("cpu", "slots", ring.nbytes)]
