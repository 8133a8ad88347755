"""Gradients in a world of one: from device slots to the host, where the update adds the last pass's to the sum.

The lane's ``d2h`` stream copies a bucket from its device slot into page-locked memory of the slots' dtype. Each bucket
has memory of its own, so backward never waits for a free host slot. Then the gradient is added to the bucket's fp32
sum, with two exceptions.
[Note: single pass] With one backward pass in a step (``grad_accum=1``) the sum is the gradient, and the update reads
that. bf16 takes 2 bytes per element instead of 4 for a sum and 2 for a slot. A second pass before ``step()``, or a
change of ``p.grad``, needs fp32 sums. These are allocated then, and stay until ``close``.
[Note: last pass] The gradient of the last of several passes stays in its slot. The update adds it to the sum of the
earlier passes (``OptimShard::addend``), and does not write the result. So host memory does not move the 8 bytes per
element of a sum that is read and written.
Any other reader gets the complete sum, for which the gradient is added first. That takes the reader's time instead of
backward's. So the step after one with such a reader adds all of its passes in backward.
Kernels convert and add gradients as a sum does, so all bits are equal.
Thread rule: as DeviceSlots.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from zcomm.memory.device_streams import own_pages
from zcomm.zero.gradients.host import Slots
from zcomm.zero.gradients.pinned import D2HPath, D2HTransport
from zcomm.zero.gradients.transport import Nbytes
from zcomm.zero.layout.flat import FlatBucket, Geometry


class BucketSlots(Slots):
    """A slot for each bucket, of its size, on pages of its own."""

    def __init__(self, geometry: Geometry, buckets: Sequence[FlatBucket], dtype: torch.dtype) -> None:
        ascending = _ascending(buckets)
        super().__init__(geometry, ascending, [own_pages(bucket.count, dtype) for bucket in ascending])

    def arrange(self, buckets: Sequence[FlatBucket]) -> None:
        super().arrange(_ascending(buckets))  # each keeps its slot


class LastPassTransport(D2HTransport):
    """Transport of buckets that leave the device of a world of one. single_pass, last_pass: as ``on_device`` of
    choose_transport.py; fp32 sums exist from the start unless single_pass.

    The gradient of a bucket is its sum, if it is one of ``_summed``, and its slot, if it is one of ``_waiting``.
    Memory: an element of the slots' dtype for each trained element; with sums 4 bytes more.
    """

    def __init__(self, path: D2HPath, single_pass: bool, last_pass: bool) -> None:
        assert path.plan.comm.world_size == 1
        slots = BucketSlots(path.plan.geometry, path.buckets, path.plan.dtype)
        super().__init__(path, slots, {} if single_pass else None)
        self._updates_add = last_pass
        self._summed: set[int] = set()
        self._waiting: set[int] = set()
        self._leaves = False  # whether this pass may leave gradients in their slots
        self._was_read = False  # whether a reader needed a sum since the last pass that could have left them

    # --- a backward pass --------------------------------------------------------------------------------------

    def begin_pass(self, last: bool) -> None:
        self._leaves = last and not self._was_read
        self._was_read = self._was_read and not last

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        index = bucket.index
        if not accumulate:
            self._summed.discard(index)
            self._waiting.discard(index)
        elif index in self._waiting:
            self._add_waiting(bucket, _PASSES)
        if self._leaves and (self._updates_add or not accumulate):
            self.copy_down(bucket)
            self._waiting.add(index)
        else:
            self._make_sums(_PASSES)
            super().start(bucket, index in self._summed)
            self._summed.add(index)

    def _add_waiting(self, bucket: FlatBucket, why: str) -> None:
        """Start to add the gradient in the bucket's slot to its sum. why: see ``_make_sums``."""
        self._make_sums(why)
        self.torn = True  # an interrupt may come before or after the addition has been started
        self.add(bucket, bucket.index in self._summed)
        self._waiting.discard(bucket.index)
        self._summed.add(bucket.index)
        self.torn = False

    def _make_sums(self, why: str) -> None:
        """Allocate the sums, if there are none. why: for the log."""
        if self.sums or not self.buckets:
            return
        flat = own_pages(sum(bucket.shard_count for bucket in self.buckets))
        logging.getLogger("zcomm").info(
            "sums of gradients are fp32 from now on, which takes %d bytes of host memory: %s. grad_accum= and "
            "clip_norm= tell ZeroOptimizer at construction",
            flat.nbytes,
            why,
        )
        self.set_sums(flat)

    def finish(self, bucket: FlatBucket) -> None:
        if bucket.index in self._waiting:
            self._await(self._copied[self.slots.number[bucket.index]])
        super().finish(bucket)

    def finish_all(self) -> None:
        for event in self._copied:
            self._await(event)
        super().finish_all()

    def _await(self, event: Any) -> None:
        start = time.perf_counter()
        self._lane.wait(event)
        self.waited_s += time.perf_counter() - start

    def forget(self) -> None:
        super().forget()
        self.torn = False

    # --- readers ----------------------------------------------------------------------------------------------

    def terms(self, bucket: FlatBucket) -> tuple[torch.Tensor, torch.Tensor | None]:
        slot = self.slot(bucket)
        if bucket.index not in self._summed:
            return slot, None
        return self.sums[bucket.index], slot if bucket.index in self._waiting else None

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        if bucket.index not in self._summed and not change:
            return self.slot(bucket)
        self._was_read = True
        if bucket.index in self._waiting:
            self._add_waiting(bucket, "changes of p.grad")
        self.wait(self.slots.number[bucket.index])
        return self.sums[bucket.index]

    def fill(self) -> None:
        super().fill()
        every = {bucket.index for bucket in self.buckets}
        if self.sums:
            self._summed, self._waiting = every, set()
            return
        for slot in self.slots.memory:
            slot.zero_()
        self._waiting = every

    @property
    def nbytes(self) -> list[Nbytes]:
        if self.sums:
            return super().nbytes
        return [(self.tier, "gradients", self.slots.nbytes)]


_PASSES = "several backward passes before step()"


def _ascending(buckets: Sequence[FlatBucket]) -> list[FlatBucket]:
    return sorted(buckets, key=lambda bucket: bucket.index)
