"""Which store keeps the parameters: by stage, by who shares memory, by device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.sections import Sections
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.params.device_shards import DeviceSource
from zcomm.zero.params.shards import ShardSource, make_source
from zcomm.zero.params.stores import ParameterStore, PrivateStore, ResidentStore, SharedStore
from zcomm.zero.unit_options import Units
from zcomm.zero.units.device import DeviceUnitStore
from zcomm.zero.units.peers import ResidentUnitStore
from zcomm.zero.units.store import UnitStore


@dataclass(frozen=True)
class _ByUnit:
    """Stage 3 by units. tiers: of the shards of each bucket."""

    sections: Sections
    geometry: Geometry
    comm: Communicator
    dtype: torch.dtype
    tiers: list[str]
    arena: _core.PinnedArena
    swap: _core.SwapFile | None
    shared: bool
    prefetch: int
    options: Units

    def _how(self, source: ShardSource) -> Any:
        """A store's arguments."""
        first = (self.sections.params, self.geometry, self.comm, self.dtype, self.tiers, self.sections.choices)
        return (*first, source, self.shared, self.prefetch, self.options.prefetch_nbytes)

    def here(self) -> UnitStore:
        geometry = self.geometry
        return UnitStore(
            *self._how(make_source(geometry.every, geometry.buckets, self.tiers, self.dtype, self.arena, self.swap))
        )

    def there(self, lane: DeviceLane, resident: Collection[int], peers: Communicator | None) -> UnitStore:
        """Shards of tier "device" stay there, if ranks reach each other's; where the host steps them, it has a copy."""
        geometry, comm, tiers = self.geometry, self.comm, self.tiers
        reached = peers is not None or comm.world_size == 1
        stay = [bucket for bucket in geometry.every if reached and tiers[bucket.index] == "device"]
        followed = {b.index for b in stay if b.index < len(geometry.buckets) and b.index not in resident}
        alone = {b.index for b in stay} - followed  # which the host has not
        every = [b for b in geometry.every if b.index not in alone]
        trained = [b for b in geometry.buckets if b.index not in resident]
        host = self._on_host(every, trained, lane) if every else None
        if host is not None and not stay:
            return DeviceUnitStore(*self._how(host), lane=lane)
        if peers is not None and resident:
            peers = peers.duplicate()  # gradients have an order of their own
        source = DeviceSource(stay, host, followed, self.dtype, peers, lane)
        return ResidentUnitStore(*self._how(source), lane=lane, peers=peers, resident=resident)

    def _on_host(self, every: list[FlatBucket], trained: list[FlatBucket], lane: DeviceLane) -> ShardSource:
        """What ranks of a host share is there once, page-locked. Collective."""

        def share(count: int) -> torch.Tensor:
            return lane.lock(self.comm.shared_empty(count, self.dtype))

        places = ["nvme" if self.tiers[b.index] == "nvme" else "cpu" for b in every]
        one_copy = share if self.shared and self.comm.world_size > 1 else None
        return make_source(every, trained, places, self.dtype, self.arena, self.swap, one_copy, self.comm.rank)


def make_store(
    sections: Sections,
    geometry: Geometry,
    comm: Communicator,
    dtype: torch.dtype,
    arena: _core.PinnedArena,
    swap: _core.SwapFile | None,
    stage: int,
    shared: bool,
    prefetch: int,
    options: Units,
    lane: DeviceLane | None,
    resident: Collection[int] = (),
    peers: Communicator | None = None,
) -> ParameterStore:
    """Collective. lane: of the model's device; None: it is on the CPU. resident: buckets that are there alone, on each
    rank's device. peers: between these (None: one rank, or they do not reach each other)."""
    tiers = [sections.list[bucket.section].weights for bucket in geometry.every]
    if sections.by_unit:
        by_unit = _ByUnit(sections, geometry, comm, dtype, tiers, arena, swap, shared, prefetch, options)
        return by_unit.here() if lane is None else by_unit.there(lane, resident, peers)
    host: ResidentStore
    if stage >= 1 and shared:
        host = SharedStore(sections.params, geometry, comm, dtype, tiers, resident)
    else:
        host = PrivateStore(sections.params, geometry, comm, dtype, tiers, stage == 0, resident)
    return host if lane is None else DeviceStore(sections.params, geometry, comm, tiers, host, lane, resident, peers)
