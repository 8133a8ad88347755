"""Gradients of one pass in a world of one: from device slots to the host, in their own dtype.

[Note: single pass] With one rank and one backward pass in a step (``grad_accum=1``), the sum of a bucket is its
gradient. The lane's ``d2h`` stream copies it from its device slot into page-locked memory of the slots' dtype, and the
update reads it there. bf16 takes 2 bytes per element instead of an fp32 sum and a host slot, and no pass over host
memory adds gradients up. Kernels convert each gradient to fp32 as a sum does, so the bits are equal.
A second pass before ``step()``, or a change of ``p.grad``, needs fp32 sums. These replace the gradients, bucket by
bucket, and stay until ``close``.
Thread rule: as DeviceSlots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from zcomm.memory.device_streams import DeviceLane, own_pages
from zcomm.zero.gradients.device_norm import NoSquares
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.pinned import D2HTransport
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, Transport
from zcomm.zero.layout.flat import FlatBucket


class SinglePassTransport(Transport):
    """Transport of buckets that leave the device, without sums. weights_ready, squares: as D2HTransport.

    Memory: an element of the slots' dtype for each trained element; after ``widen``, that of a D2HTransport.
    ``_landed`` has an event for each bucket's copy to the host. It is empty after ``widen``, which sets ``_wide``.
    """

    _wide: D2HTransport

    def __init__(
        self,
        plan: ReducePlan,
        buckets: Sequence[FlatBucket],
        device_slots: DeviceSlots,
        lane: DeviceLane,
        weights_ready: Any,
        squares: NoSquares,
    ) -> None:
        assert plan.comm.world_size == 1
        gradients = {b.index: lane.lock(own_pages(b.shard_count, plan.dtype)) for b in buckets}
        super().__init__(plan, buckets, torch.empty(0), gradients)
        self._lane, self._device_slots, self._squares = lane, device_slots, squares
        self._weights_ready = weights_ready
        self._landed = {bucket.index: lane.event() for bucket in buckets}
        self._slots_nbytes = 0

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        self._device_slots.put(index, grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        if accumulate:
            self.widen("several backward passes before step()")
        self.moved_nbytes += bucket.count * self.plan.dtype.itemsize
        if not self._landed:
            self._wide.start(bucket, accumulate)
            return
        source = self._device_slots.complete(bucket)
        after = self._squares.add(source, self._device_slots.written(bucket))
        freed = self._device_slots.freed[self._device_slots.number[bucket.index]]
        copies = [(self.sums[bucket.index], source)]
        self._lane.d2h.copy(copies, [self._weights_ready, *after], self._landed[bucket.index], freed)

    def finish(self, bucket: FlatBucket) -> None:
        start = time.perf_counter()
        if self._landed:
            self._lane.wait(self._landed[bucket.index])
        else:
            self._wide.finish(bucket)
        self.waited_s += time.perf_counter() - start

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        if change:
            self.widen("changes of p.grad")
        return super().open(bucket, change)

    def widen(self, why: str) -> None:
        """Replace the gradients by fp32 sums of equal values, once. why: for the log."""
        if not self._landed:
            return
        self.finish_all()
        if self.plan.dtype != torch.float32:
            logging.getLogger("zcomm").info(
                "sums of gradients are fp32 from now on, which takes %d bytes more of host memory: %s. grad_accum= and "
                "clip_norm= tell ZeroOptimizer at construction",
                sum((torch.float32.itemsize - each.itemsize) * each.numel() for each in self.sums.values()),
                why,
            )
            for index, gradient in self.sums.items():
                if gradient.dtype != torch.float32:  # an interrupt may have ended an earlier call
                    self.sums[index] = own_pages(gradient.numel()).copy_(gradient)
                    self._lane.unlock(gradient)
        self._wide = D2HTransport(
            self.plan,
            self.buckets,
            self._device_slots,
            self._lane,
            self._weights_ready,
            self._squares,
            sums=self.sums,
        )
        self._slots_nbytes = self._wide.slots.nbytes
        self._landed.clear()

    def arrange(self, order: Sequence[FlatBucket]) -> None:
        super().arrange(order)
        if not self._landed:
            self._wide.arrange(order)

    @property
    def nbytes(self) -> list[Nbytes]:
        gradients = sum(each.nbytes for each in self.sums.values())
        return [("cpu", "gradients", gradients), ("cpu", "slots", self._slots_nbytes)]

    def close(self) -> None:
        if not self._landed:
            self._wide.close()
        super().close()
