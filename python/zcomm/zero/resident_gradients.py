"""Gradients of a world of one, of which some never leave the device: they are added up where their step will be.

A resident bucket goes from its device slot into an fp32 accumulator on the device, on torch's stream: cast, divided by
one rank, added, as the host's reduce_scatter does, so the bits are the same. The others go as in device_gradients.py.
Thread rule: as DeviceReducer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm._tensors import core_dtype
from zcomm.comm import Communicator
from zcomm.zero.device_gradients import DeviceReducer
from zcomm.zero.device_norm import DeviceSquares
from zcomm.zero.geometry import FlatBucket, Geometry


class ResidentReducer(DeviceReducer):
    """resident: numbers of the buckets that stay. Memory: their accumulators are on the device."""

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
    ) -> None:
        assert comm.world_size == 1
        self._added = {index: lane.event() for index in resident}  # the bucket's last gradients have been
        how = (params, geometry, comm, dtype, replicated, overlap, names)
        super().__init__(*how, lane, weights_came, resident, squares)

    def _make_accumulators(self) -> torch.Tensor:
        counts = [bucket.count for bucket in self._geometry.buckets]
        stay = [bucket.index in self._added for bucket in self._geometry.buckets]
        here = [count * (not at) for count, at in zip(counts, stay, strict=True)]
        there = [count * at for count, at in zip(counts, stay, strict=True)]
        host = torch.zeros(sum(here))
        self._resident = self._lane.empty(sum(there), torch.float32, "gradients")
        views = zip(stay, host.split(here), self._resident.split(there), strict=True)
        self._sums: list[torch.Tensor] = [on_device if at else on_host for at, on_host, on_device in views]
        return host

    def bucket_view(self, bucket: FlatBucket) -> torch.Tensor:
        return self._sums[bucket.index]

    def shard_view(self, bucket: FlatBucket) -> torch.Tensor:
        return self._sums[bucket.index]

    @property
    def nbytes_by_tier(self) -> dict[str, dict[str, int]]:
        tiers = super().nbytes_by_tier
        tiers["device"]["gradients"] = self._resident.nbytes
        return tiers

    def _reduce(self, bucket: FlatBucket, slot: torch.Tensor) -> None:
        if bucket.index not in self._added:
            super()._reduce(bucket, slot)
            return
        self.before_reduce()
        place, stream = self._position[bucket.index] % self._slot_count, self._lane.current()
        for event in (self._added[bucket.index], *self._written(place)):
            stream.wait(event)
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

    def _wait_for(self, bucket: FlatBucket) -> None:
        if bucket.index not in self._added:
            super()._wait_for(bucket)

    def _finish_one(self, bucket: FlatBucket) -> None:
        """What torch's stream is given next sees the sum of a resident one."""
        if bucket.index in self._added:
            self._lane.current().wait(self._added[bucket.index])
        else:
            super()._finish_one(bucket)

    def finish(self, bucket: FlatBucket | None = None) -> None:
        super().finish(bucket)
        if bucket is None:
            for index in self._added:
                self._lane.current().wait(self._added[index])

    def close(self) -> None:
        super().close()
        self._sums.clear()
        self._resident = torch.empty(0)
