"""Gradients that never leave the devices: they are added up on the device of their step.

In a world of one a bucket is added from its device slot into an fp32 accumulator on the device, on torch's stream. That
casts, divides by one rank and adds, as the host's reduce_scatter does. Several ranks do so together: the slots are
symmetric memory of their devices, and the bucket's reduce_scatter is one of ``MeshComms.peers``. The bits are the
host's. Torch's stream waits for its end only when the slot or the sum is needed. Until then hooks continue, and the
host waits for other ranks' calls no sooner.
[Note: hops on devices] With copies of shards a sum has a second hop, across groups ([Note: sums of groups]). It is a
reduce_scatter and an all_gather of ``peers_across``: NCCL adds in the order of ranks in a reduce_scatter only. Its
thread waits for the first hop, and a step for the second. If NCCL has both hops, they take turns: a device has one
order for all of NCCL's calls, the same on all ranks.
Thread rule: as DeviceSlots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.gradients.across import AcrossGroups, work_of
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.transport import Nbytes, ReducePlan, Transport
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket


class AcrossDevices(AcrossGroups):
    """The hops across groups between devices ([Note: hops on devices]). Sums have ``room``."""

    def __init__(self, comms: MeshComms, buckets: Sequence[FlatBucket], slots: int, lane: DeviceLane) -> None:
        super().__init__(comms, buckets, slots)
        across = comms.peers_across
        self.comm, self._lane = across if isinstance(across, Communicator) else None, lane
        self._groups = across.world_size
        if self.hops:  # torch multiplies a tensor on a device by the reciprocal of a number
            self.divisor = lane.empty(1, torch.float32, "a divisor").fill_(comms.divide_by)

    def room(self, count: int) -> int:
        """Return the elements that a sum of ``count`` needs: all groups have equal parts of it."""
        return -(-count // self._groups) * self._groups

    def allocate(self, count: int) -> torch.Tensor:
        return self._lane.empty(self.room(count), torch.float32, "sums across groups")

    def start(self, bucket: FlatBucket, sum_: torch.Tensor, mine: torch.Tensor, name: str) -> list[Work]:
        assert self.comm is not None
        whole = sum_.as_strided((self.room(sum_.numel()),), (1,))
        own = whole.view(self._groups, -1)[self.comm.rank]
        works = [
            work_of(self.comm.reduce_scatter(whole, out=own, async_op=True, name=name, order="rank")),
            work_of(self.comm.all_gather(own, out=whole, async_op=True, name=name)),
        ]
        if isinstance(peers := self.comms.peers, Communicator) and not (peers.is_symmetric or self.comm.is_symmetric):
            works.append(peers.after(works[-1]))
        return works


class DeviceTransport(Transport):
    """Transport of buckets with their sums on the device. added: by bucket: the event after its last gradients were
    added.

    Memory: their accumulators, on the device.
    """

    on_device = True

    def __init__(self, plan: ReducePlan, buckets: Sequence[FlatBucket], slots: DeviceSlots, lane: DeviceLane) -> None:
        self._lane, self._slots, self._peers = lane, slots, plan.comms.peers
        assert self._peers.world_size == plan.comm.world_size
        across = AcrossDevices(plan.comms, buckets, len(slots.memory), lane)
        rooms = [across.room(bucket.shard_count) for bucket in buckets]
        flat = lane.empty(sum(rooms), torch.float32, "gradients")
        parts = zip(buckets, flat.split(rooms), strict=True)
        super().__init__(plan, buckets, flat, {bucket.index: part[: bucket.shard_count] for bucket, part in parts})
        self.across = across
        self.added = {bucket.index: lane.event() for bucket in buckets}
        self._hops: dict[int, Work] = {}  # by bucket: pending sums across groups
        self._staged: dict[int, FlatBucket] = {}  # by slot: the bucket that used the staging slot last

    def is_waiting(self) -> bool:
        return self._slots.is_waiting() or any(not hop.done() for hop in self._hops.values())

    def put(self, index: int, grad: torch.Tensor | None) -> None:
        self._slots.put(index, grad)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        index, across, number = bucket.index, self.across, self._slots.number[bucket.index]
        source, stream, added = self._slots.complete(bucket), self._lane.current(), self.added[index]
        out = target = self.sums[index]
        self._end_hop(bucket)
        if across.staged:
            self._end_hop(self._staged.get(number, bucket))
            self._staged[number] = bucket
            out, accumulate = across.slot(number, bucket), False
        for event in (added, *self._slots.written(bucket)):
            stream.wait(event)
        name, op, work = f"gradients of bucket {index}", "sum" if across.hops else "avg", None
        if isinstance(self._peers, Communicator):
            given: Any = {"accumulate": accumulate, "name": name, "async_op": True}
            work = work_of(self._peers.reduce_scatter([source], op, out=[out], **given))
            self._slots.share(bucket, work, added)
        else:
            stream.reduce(
                [out.data_ptr()],
                [source.data_ptr()],
                bucket.count,
                core_dtype(self.plan.dtype),
                _core.DType.float32,
                _core.ReduceOp.avg,
                accumulate,
            )
            stream.record(self._slots.freed[number])
            stream.record(added)
        if across.hops and (hop := across.follow(work, out, target, name, bucket)) is not work:
            assert hop is not None
            self._hops[index] = hop

    def finish(self, bucket: FlatBucket) -> None:
        """Let later work of torch's stream see the sum."""
        self._slots.join_bucket(bucket)
        self._lane.current().wait(self.added[bucket.index])
        self._end_hop(bucket)

    def _end_hop(self, bucket: FlatBucket) -> None:
        hop = self._hops.get(bucket.index)
        if hop is not None:
            start = time.perf_counter()
            hop.wait()
            self._hops.pop(bucket.index, None)
            self.waited_s += time.perf_counter() - start
            self._lane.recorded(self.added[bucket.index])

    def forget(self) -> None:
        self.across.torn = False

    @property
    def nbytes(self) -> list[Nbytes]:
        return [("device", "gradients", self.flat.nbytes), ("device", "slots", self.across.nbytes)]

    def close(self) -> None:
        self._hops.clear()
        self.across.close()
        super().close()
