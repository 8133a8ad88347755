"""Gradients that never leave the devices: they are added up on the device of their step.

In a world of one a bucket is added from its device slot into an fp32 accumulator on the device, on torch's stream. That
casts, divides by one rank and adds, as the host's reduce_scatter does. Several ranks do so together: the slots are
symmetric memory of their devices, and the bucket's reduce_scatter is one of ``peers``. The bits are the host's.
Torch's stream waits for its end only when the slot or the sum is needed. Until then hooks continue, and the host waits
for other ranks' calls no sooner.
Thread rule: as DeviceSlots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane, Peers
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, Transport
from zcomm.zero.layout.flat import FlatBucket


class DeviceTransport(Transport):
    """Transport of buckets with their sums on the device. peers: joins the ranks' devices. added: by bucket: the event
    after its last gradients were added.

    Memory: their accumulators, on the device.
    """

    on_device = True

    def __init__(
        self, plan: ReducePlan, buckets: Sequence[FlatBucket], slots: DeviceSlots, lane: DeviceLane, peers: Peers
    ) -> None:
        assert peers.world_size == plan.comm.world_size
        kept = sum(bucket.shard_count for bucket in buckets)
        super().__init__(plan, buckets, lane.empty(kept, torch.float32, "gradients"))
        self._lane, self._slots, self._peers = lane, slots, peers
        self.added = {bucket.index: lane.event() for bucket in buckets}

    def is_waiting(self) -> bool:
        return self._slots.is_waiting()

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        self._slots.put(index, grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        source, stream, added = self._slots.complete(bucket), self._lane.current(), self.added[bucket.index]
        for event in (added, *self._slots.written(bucket)):
            stream.wait(event)
        if isinstance(self._peers, Communicator):
            name = f"gradients of bucket {bucket.index}"
            shard = [self.sums[bucket.index]]
            _, work = self._peers.reduce_scatter(
                [source], "avg", out=shard, accumulate=accumulate, name=name, async_op=True
            )
            assert isinstance(work, Work)
            self._slots.share(bucket, work, added)
            return
        stream.reduce(
            [self.sums[bucket.index].data_ptr()],
            [source.data_ptr()],
            bucket.count,
            core_dtype(self.plan.dtype),
            _core.DType.float32,
            _core.ReduceOp.avg,
            accumulate,
        )
        stream.record(self._slots.freed[self._slots.number[bucket.index]])
        stream.record(added)

    def finish(self, bucket: FlatBucket) -> None:
        """Let later work of torch's stream see the sum."""
        self._slots.join_bucket(bucket)
        self._lane.current().wait(self.added[bucket.index])

    @property
    def nbytes(self) -> list[Nbytes]:
        return [("device", "gradients", self.flat.nbytes)]
