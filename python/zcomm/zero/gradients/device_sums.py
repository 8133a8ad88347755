"""Gradients of several passes in a world of one: fp32 sums on the device, and one copy to the host in a step.

[Note: sums on a device] Each pass adds a bucket from its device slot to an fp32 sum on the device. In the last pass
that the step expects, the lane's ``d2h`` stream copies the sum into page-locked memory, and the update reads it there.
So a step copies 4 bytes per element, whatever the number of its passes, and the host adds nothing up. The terms and
their order are the host's, so the bits are equal.
A program may run fewer or more passes, and read or change ``p.grad`` between them. So each sum has a state, Newest: the
copy of it that is valid. A read of the host's copy first renews it, if only the device's is valid. A pass that follows
a change of the host's copy first copies that to the device.
Thread rule: as DeviceSlots. ``expect``, ``open`` and ``finish`` may run on the thread of an update, one thread at a
time: they queue nothing on torch's stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch

from zcomm.memory.device_streams import own_pages
from zcomm.zero.gradients.peers import DeviceTransport
from zcomm.zero.gradients.pinned import D2HPath
from zcomm.zero.gradients.transport import Nbytes, Transport
from zcomm.zero.layout.flat import FlatBucket


class Newest(Enum):
    """The valid copy of a bucket's sum. BOTH: the copy to the host has been queued."""

    DEVICE = auto()
    BOTH = auto()
    HOST = auto()


class DeviceSumsTransport(Transport):
    """Transport of buckets that leave the device as sums.

    Memory: an fp32 element for each trained element, on the device and in host memory.
    """

    def __init__(self, path: D2HPath) -> None:
        plan, buckets, lane = path.plan, path.buckets, path.lane
        on_host = {bucket.index: lane.lock(own_pages(bucket.shard_count)) for bucket in buckets}
        super().__init__(plan, buckets, torch.empty(0), on_host)
        self._device = DeviceTransport(plan, buckets, path.device_slots, lane)
        self._lane, self._squares, self._weights_ready = lane, path.squares, path.weights_ready
        self._landed = {bucket.index: lane.event() for bucket in buckets}  # the last copy of the sum to the host
        self._newest = {bucket.index: Newest.HOST for bucket in buckets}  # zeros
        self._last = False  # the step expects no pass after this one

    def begin_pass(self, last: bool) -> None:
        self._last = last

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        self._device.put(index, grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        index, sum_ = bucket.index, self._device.sums[bucket.index]
        self._wait_for_copy(index)
        if accumulate and self._newest[index] is Newest.HOST:
            self._lane.current().copy(sum_.data_ptr(), self.sums[index].data_ptr(), sum_.nbytes)
        self._newest[index] = Newest.DEVICE
        self._device.start(bucket, accumulate)
        self.moved_nbytes += bucket.count * self.plan.dtype.itemsize
        after = self._squares.add(sum_, [self._device.added[index]])
        if self._last:
            self._land(index, after)

    def _wait_for_copy(self, index: int) -> None:
        """Let torch's stream wait for the last copy of a sum to the host. A skipped step has not waited for it."""
        self._lane.current().wait(self._landed[index])

    def _land(self, index: int, after: Sequence[Any]) -> None:
        """Copy a sum to the host, behind the events ``after``. Does not wait."""
        copies = [(self.sums[index], self._device.sums[index])]
        self._lane.d2h.copy(copies, [self._weights_ready, *after], self._landed[index])
        self._newest[index] = Newest.BOTH

    def expect(self, bucket: FlatBucket) -> None:
        if self._newest[bucket.index] is Newest.DEVICE:  # the step has fewer passes, or the program reads p.grad
            self._land(bucket.index, [self._device.added[bucket.index]])

    def finish(self, bucket: FlatBucket) -> None:
        """Wait for the bucket's copy to the host, if it was queued."""
        start = time.perf_counter()
        self._lane.wait(self._landed[bucket.index])
        self.waited_s += time.perf_counter() - start

    def finish_all(self) -> None:
        """Copy all sums to the host: the caller reads them."""
        for bucket in self.buckets:
            self.expect(bucket)
        self.wait_all()

    def wait_all(self) -> None:
        for bucket in self.buckets:
            self.finish(bucket)

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        self.expect(bucket)
        self.finish(bucket)
        if change:
            self._newest[bucket.index] = Newest.HOST
        return super().open(bucket, change)

    def fill(self) -> None:
        """Make the sums zero. ``finish_all`` has ended all copies of them."""
        self._newest = dict.fromkeys(self._newest, Newest.HOST)
        super().fill()

    @property
    def nbytes(self) -> list[Nbytes]:
        return [*self._device.nbytes, ("cpu", "gradients", sum(each.nbytes for each in self.sums.values()))]

    def close(self) -> None:
        self._device.close()
        super().close()
