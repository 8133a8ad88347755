"""Device slots: the ring on a device that hooks copy gradients into, for both transports of a device.

[Note: gradient slots] Hooks copy on torch's stream. The first copy into a slot makes that stream wait for the slot's
last reader. That is a copy to the host, or a reduction between the devices. So backward is queued on the device without
waiting. A reader of a slot waits for all streams that wrote into it.
Thread rule: as GradientReducer; autograd calls the hooks of a device on a thread of its own, one at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.gradients.host import Slots
from zcomm.zero.gradients.transport import ReducePlan
from zcomm.zero.layout.flat import FlatBucket


class DeviceSlots(Slots):
    """The ring, and the devices that write into it. The plan's ``peers`` reach its memory.

    freed: by slot: the event after its last read. waited_s: seconds of waiting for other ranks.
    Memory: min(SLOTS, buckets) x largest bucket x itemsize, on the device.
    """

    def __init__(self, plan: ReducePlan, lane: DeviceLane) -> None:
        count, largest = plan.slot_count, max((bucket.count for bucket in plan.geometry.buckets), default=0)
        self._lane = lane
        self.freed = [lane.event() for _ in range(count)]
        self._filled = [lane.event() for _ in range(count)]
        self._writers: list[dict[int, Any]] = [{} for _ in range(count)]  # streams, by id
        self._shared: dict[int, tuple[int, Work, Any]] = {}  # by slot: see share()
        self._bucket_of = [place.bucket for place in plan.geometry.places]
        memory = [lane.buffer(plan.comms.peers, largest, plan.dtype, "gradients in flight") for _ in range(count)]
        self.waited_s = 0.0
        super().__init__(plan.geometry, plan.order, memory)

    def arrange(self, buckets: Sequence[FlatBucket]) -> None:
        for number in list(self._shared):
            self.join(number)
        super().arrange(buckets)

    def enter(self, bucket: int) -> None:
        """Let torch's current stream write into the bucket's slot."""
        number = self.number[bucket]
        if number in self._shared:
            self.join(number)
        stream, writers = self._lane.current(), self._writers[number]
        if id(stream) not in writers:
            stream.wait(self.freed[number])
            writers[id(stream)] = stream

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        """See Transport.put."""
        self.enter(self._bucket_of[index])
        view = self.view(index)
        if grad is None:
            view.zero_()
        else:
            view.copy_(grad)

    def complete(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the bucket's slot, with padding, for a read."""
        self.enter(bucket.index)
        self.pad(bucket)
        return self.of(bucket)

    def written(self, bucket: FlatBucket) -> list[Any]:
        """Record events on the streams that have written into the slot; its next writers wait again."""
        number = self.number[bucket.index]
        events: list[Any] = []
        for stream in self._writers[number].values():
            event = self._filled[number] if not events else self._lane.event()
            stream.record(event)
            events.append(event)
        self._writers[number].clear()
        return events

    # --- reductions that read the slots themselves ------------------------------------------------------------

    def is_waiting(self) -> bool:
        """Return True if a reduction between devices has not ended."""
        return any(not work.done() for _, work, _ in self._shared.values())

    def share(self, bucket: FlatBucket, work: Work, added: Any) -> None:
        """Keep ``work``, a reduction between devices that no stream waits for yet; ``join`` records ``added`` then."""
        self._shared[self.number[bucket.index]] = bucket.index, work, added

    def join(self, number: int) -> None:
        """Wait until all ranks have started the reduction that reads the slot; torch's stream continues after it."""
        _, work, added = self._shared[number]
        start = time.perf_counter()
        work.wait()
        del self._shared[number]
        self.waited_s += time.perf_counter() - start
        stream = self._lane.current()
        stream.record(self.freed[number])
        stream.record(added)

    def join_bucket(self, bucket: FlatBucket) -> None:
        number = self.number[bucket.index]
        if number in self._shared and self._shared[number][0] == bucket.index:
            self.join(number)

    def close(self) -> None:
        self._shared.clear()
        super().close()
