"""Gradients of a model on a device: through device slots and pinned host slots into host accumulators.

[Note: gradients from a device] Hooks copy gradients into a device slot (device_slots.py). A complete bucket is copied,
on the lane's ``d2h`` stream, into a pinned host slot of the communicator's memory. Its reduce_scatter begins when the
copy has ended. Host slots form a longer ring (HOST_SLOTS_NBYTES): the host waits, for the oldest reduce_scatter, only
if all of them are full. Terms and their order are as on the CPU: the same gradients give the same bits.
A copy of a bucket also follows all copies of weights to the device that were begun before it. So a rank that has the
sum of a bucket knows that no rank reads the weights of the last step any more.
Thread rule: as DeviceSlots.
Source: ZeRO-Offload (arXiv:2101.06840).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.memory.device_streams import DeviceLane, own_pages
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.host import HostTransport, Slots, shared_slots
from zcomm.zero.gradients.norm import NoSquares
from zcomm.zero.gradients.transport import SLOTS, ReducePlan
from zcomm.zero.layout.flat import FlatBucket

HOST_SLOTS_NBYTES = 1 << 30  # how far backward may run ahead of the host; at least SLOTS slots, at most all buckets


def host_slots(buckets: int, slot_nbytes: int) -> int:
    """Return the number of host slots."""
    return min(buckets, max(SLOTS, HOST_SLOTS_NBYTES // max(slot_nbytes, 1)))


@dataclass(frozen=True)
class D2HPath:
    """Buckets that leave the device, and their way. weights_ready: the event after all copies of older weights to the
    device. squares: of the gradients, or sums, that are copied (NoSquares: more than one rank)."""

    plan: ReducePlan
    buckets: Sequence[FlatBucket]
    device_slots: DeviceSlots
    lane: DeviceLane
    weights_ready: Any
    squares: NoSquares


class D2HTransport(HostTransport):
    """Transport of buckets that leave the device: through device slots into the host slots of a HostTransport.

    slots: None: host_slots() of them. sums: None: accumulators in host memory.
    """

    tier = "cpu"

    def __init__(self, path: D2HPath, slots: Slots | None = None, sums: dict[int, torch.Tensor] | None = None) -> None:
        plan, buckets, lane = path.plan, path.buckets, path.lane
        if slots is None:
            largest = max((bucket.count for bucket in buckets), default=0)
            slots = shared_slots(plan, buckets, host_slots(len(buckets), largest * plan.dtype.itemsize))
        super().__init__(plan, buckets, slots, private=own_pages, sums=sums)
        for memory in self.slots.memory:
            lane.lock(memory)
        self._lane, self._device_slots, self._squares = lane, path.device_slots, path.squares
        self._weights_ready = path.weights_ready
        self._copied = [lane.event() for _ in slots.memory]  # the copy into the host slot
        self._afters: list[Any] = [None] * len(slots.memory)

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        self._device_slots.put(index, grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        self.copy_down(bucket)
        self.add(bucket, accumulate)

    def copy_down(self, bucket: FlatBucket) -> None:
        """Start the copy of the bucket's device slot to its host slot, and free the device slot behind it."""
        source = self._device_slots.complete(bucket)
        number = self.slots.number[bucket.index]
        self.wait(number)  # until the slot's last bucket has been added
        written = self._device_slots.written(bucket)
        after = self._squares.add(source, written)
        freed = self._device_slots.freed[self._device_slots.number[bucket.index]]
        copies = [(self.slot(bucket), source)]
        self.moved_nbytes += source.nbytes
        self._lane.d2h.copy(copies, [self._weights_ready, *after], self._copied[number], freed)

    def add(self, bucket: FlatBucket, accumulate: bool) -> None:
        """Start to add the bucket's host slot to the accumulator, behind its copy. accumulate: as ``start``."""
        number = self.slots.number[bucket.index]
        # The communicator's next operation begins when the host slot is filled; a dropped Work would be waited for.
        self._afters[number] = self.plan.comm._core.after(self._copied[number], True)
        self.reduce(bucket, accumulate)
