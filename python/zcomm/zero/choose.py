"""Which store keeps the parameters, and which state the optimizer's arrays: by stage, tier, shared memory, device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.sections import Sections
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.nvme import SwappedState
from zcomm.zero.optim_state.ram import RamState, ShardState
from zcomm.zero.optim_state.staged import StagedState
from zcomm.zero.optim_state.tiered import TieredState
from zcomm.zero.options import Units
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.params.device_shards import DeviceSource
from zcomm.zero.params.shards import ShardSource, make_source
from zcomm.zero.params.stores import ParameterStore, PrivateStore, ResidentStore, SharedStore
from zcomm.zero.rules.rule import Rule
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


def make_state(
    counts: Sequence[int],
    tiers: Sequence[str],
    dtype: torch.dtype,
    rule: Rule,
    arena: _core.PinnedArena,
    swap: _core.SwapFile | None,
    fraction: float,
    lane: DeviceLane | None,
    resident: Collection[int],
) -> ShardState:
    """counts, tiers: of each trained bucket's shard. lane: of the model's device; None: it is on the CPU, whose memory
    is both "device" and "cpu". resident: numbers of the buckets whose weights and gradients are on the device, too."""
    there = [lane is not None and tier == "device" for tier in tiers]
    here = [0 if at else count for count, at in zip(counts, there, strict=True)]
    if lane is not None and "nvme" not in tiers:
        fraction = 1.0  # ``tiers`` says it
    host: ShardState
    if swap is not None and "nvme" in tiers and TileForm(rule.arrays, dtype, rule.state_dtype).element_nbytes:
        host = SwappedState(here, tiers, dtype, rule, arena, swap, fraction)
    else:
        host = RamState(here, tiers, dtype, rule, arena, fraction)
    if lane is None or not any(there):
        return host
    state: ShardState = host
    for kind, inside in ((StagedState, False), (DeviceState, True)):
        theirs = [at and (number in resident) == inside for number, at in enumerate(there)]
        if any(theirs):
            own = [count if at else 0 for count, at in zip(counts, theirs, strict=True)]
            state = TieredState(state, kind(own, dtype, rule, lane), theirs)
    return state
