"""Gradients of which some never leave the devices: they are added up where their step will be.

A rank that is alone adds a resident bucket from its device slot into an fp32 accumulator on the device, on torch's
stream: cast, divided by one rank, added, as the host's reduce_scatter does. Several ranks do so together: the slots are
symmetric memory of their devices, and the bucket's reduce_scatter is one of ``peers``. The bits are those of the host.
Its end is known to torch's stream only when somebody wants the slot or the sum: until then hooks go on, and the host
waits for other ranks' calls no sooner. The other buckets go as in pinned.py.
Thread rule: as DeviceReducer.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.comm.work import Work
from zcomm.memory.device_streams import DeviceLane, own_pages
from zcomm.zero.gradients.device_norm import DeviceSquares
from zcomm.zero.gradients.pinned import DeviceReducer
from zcomm.zero.layout.flat import FlatBucket, Geometry


class ResidentReducer(DeviceReducer):
    """resident: numbers of the buckets that stay. peers: between the ranks' devices; None: this rank is alone.
    Memory: their accumulators, whole ones (stage 0) or this rank's shards, are on the device."""

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        geometry: Geometry,
        comm: Communicator,
        dtype: torch.dtype,
        replicated: bool,
        overlap: bool,
        names: Sequence[str],
        lane: DeviceLane,
        weights_came: Any,
        resident: Collection[int],
        squares: DeviceSquares | None,
        peers: Communicator | None = None,
    ) -> None:
        assert peers is not None or comm.world_size == 1
        self._peers = peers
        self._added = {index: lane.event() for index in resident}  # the bucket's last gradients have been
        self._sharing: dict[int, tuple[int, Work]] = {}  # by slot: bucket and reduction whose end no stream knows yet
        how = (params, geometry, comm, dtype, replicated, overlap, names)
        super().__init__(*how, lane, weights_came, resident, squares)

    def _device_slots(self, count: int, largest: int) -> list[torch.Tensor]:
        if self._peers is None:
            return super()._device_slots(count, largest)
        what = "gradients in flight"
        return [self._lane.symmetric(self._peers, largest, self._dtype, what) for _ in range(count)]

    def _make_accumulators(self) -> torch.Tensor:
        buckets = self._geometry.buckets
        counts = [bucket.count if self.replicated else bucket.shard_count for bucket in buckets]
        stay = [bucket.index in self._added for bucket in buckets]
        here = [count * (not at) for count, at in zip(counts, stay, strict=True)]
        there = [count * at for count, at in zip(counts, stay, strict=True)]
        host = self._comm.empty(sum(here), torch.float32) if self.replicated else own_pages(sum(here))
        if self.replicated and self._peers is not None:
            self._resident = self._lane.symmetric(self._peers, sum(there), torch.float32, "gradients")
        else:
            self._resident = self._lane.empty(sum(there), torch.float32, "gradients")
        views = zip(stay, host.split(here), self._resident.split(there), strict=True)
        self._sums: list[torch.Tensor] = [on_device if at else on_host for at, on_host, on_device in views]
        return host

    def bucket_view(self, bucket: FlatBucket) -> torch.Tensor:
        return self._sums[bucket.index]

    def shard_view(self, bucket: FlatBucket) -> torch.Tensor:
        sums = self._sums[bucket.index]
        return sums[bucket.shard(self._comm.rank)] if self.replicated else sums

    @property
    def nbytes_by_tier(self) -> dict[str, dict[str, int]]:
        tiers = super().nbytes_by_tier
        tiers["device"]["gradients"] = self._resident.nbytes
        return tiers

    # --- reducing ---------------------------------------------------------------------------------------------

    def _reduce(self, bucket: FlatBucket, slot: torch.Tensor) -> None:
        if bucket.index not in self._added:
            super()._reduce(bucket, slot)
            return
        self.before_reduce()
        place, stream = self._position[bucket.index] % self._slot_count, self._lane.current()
        for event in (self._added[bucket.index], *self._written(place)):
            stream.wait(event)
        if self._peers is not None:
            self._share(self._peers, bucket, slot, place)
            return
        stream.reduce(
            [self._sums[bucket.index].data_ptr()],
            [slot.data_ptr()],
            bucket.count,
            core_dtype(self._dtype),
            _core.DType.float32,
            _core.ReduceOp.avg,
            not self._fresh,
        )
        stream.record(self._left[place])
        stream.record(self._added[bucket.index])

    def _share(self, peers: Communicator, bucket: FlatBucket, slot: torch.Tensor, place: int) -> None:
        """Start to add up what all ranks have in their slots."""
        shard = [self.shard_view(bucket)]
        how: dict[str, Any] = {"accumulate": not self._fresh, "name": f"gradients of bucket {bucket.index}"}
        _, work = peers.reduce_scatter([slot], "avg", out=shard, async_op=True, **how)
        assert isinstance(work, Work)
        self._sharing[place] = bucket.index, work

    def _join(self, place: int) -> None:
        """What was reduced from the slot is what torch's stream comes after, and the events say so to others."""
        if place not in self._sharing:
            return
        index, work = self._sharing[place]
        start = time.perf_counter()
        work.wait()
        del self._sharing[place]
        self.waited_s += time.perf_counter() - start
        stream = self._lane.current()
        stream.record(self._left[place])
        stream.record(self._added[index])

    def _enter(self, bucket: int) -> None:
        self._join(self._position[bucket] % self._slot_count)
        super()._enter(bucket)

    # --- waiting ----------------------------------------------------------------------------------------------

    def _wait_for(self, bucket: FlatBucket) -> None:
        if bucket.index in self._added:
            self._join(self._position[bucket.index] % self._slot_count)
        else:
            super()._wait_for(bucket)

    def _finish_one(self, bucket: FlatBucket) -> None:
        """What torch's stream is given next sees the sum of a resident one."""
        if bucket.index not in self._added:
            super()._finish_one(bucket)
            return
        place = self._position[bucket.index] % self._slot_count
        if place in self._sharing and self._sharing[place][0] == bucket.index:
            self._join(place)
        self._lane.current().wait(self._added[bucket.index])

    def finish(self, bucket: FlatBucket | None = None) -> None:
        super().finish(bucket)
        if bucket is None:
            for place in list(self._sharing):
                self._join(place)
            for index in self._added:
                self._lane.current().wait(self._added[index])

    def gather(self) -> None:
        """Of the buckets that are on the host."""
        self._gather(self._comm, [bucket for bucket in self._geometry.buckets if bucket.index not in self._added])

    def gather_resident(self) -> None:
        """As ``gather``, of the others."""
        if self._peers is not None:
            self._gather(self._peers, [bucket for bucket in self._geometry.buckets if bucket.index in self._added])

    def close(self) -> None:
        super().close()
        self._sharing.clear()
        self._sums.clear()
        self._resident = torch.empty(0)
