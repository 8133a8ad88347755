"""Which store keeps the parameters: by stage, by who shares memory, by device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm.comm import Communicator
from zcomm.zero.device_sources import DeviceSource
from zcomm.zero.device_units import DeviceUnitStore
from zcomm.zero.device_weights import DeviceStore
from zcomm.zero.geometry import Geometry
from zcomm.zero.parameters import ParameterStore, PrivateStore, ResidentStore, SharedStore
from zcomm.zero.resident_units import ResidentUnitStore
from zcomm.zero.sections import Sections
from zcomm.zero.sources import make_source
from zcomm.zero.unit_options import Units
from zcomm.zero.units import UnitStore


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
    rank's device, between which ``peers`` moves them (None: one rank)."""
    tiers = [sections.list[bucket.section].weights for bucket in geometry.every]
    if sections.by_unit:
        how = (sections, geometry, comm, dtype, tiers, arena, swap, shared, prefetch, options)
        return _by_unit(*how) if lane is None else _by_unit_there(*how, lane, resident, peers)
    host: ResidentStore
    if stage >= 1 and shared:
        host = SharedStore(sections.params, geometry, comm, dtype, tiers, resident)
    else:
        host = PrivateStore(sections.params, geometry, comm, dtype, tiers, stage == 0, resident)
    return host if lane is None else DeviceStore(sections.params, geometry, comm, tiers, host, lane, resident, peers)


def _by_unit(
    sections: Sections,
    geometry: Geometry,
    comm: Communicator,
    dtype: torch.dtype,
    tiers: list[str],
    arena: _core.PinnedArena,
    swap: _core.SwapFile | None,
    shared: bool,
    prefetch: int,
    options: Units,
) -> UnitStore:
    source = make_source(geometry.every, geometry.buckets, tiers, dtype, arena, swap)
    ahead = (prefetch, options.prefetch_nbytes)
    return UnitStore(sections.params, geometry, comm, dtype, tiers, sections.choices, source, shared, *ahead)


def _by_unit_there(
    sections: Sections,
    geometry: Geometry,
    comm: Communicator,
    dtype: torch.dtype,
    tiers: list[str],
    arena: _core.PinnedArena,
    swap: _core.SwapFile | None,
    shared: bool,
    prefetch: int,
    options: Units,
    lane: DeviceLane,
    resident: Collection[int],
    peers: Communicator | None,
) -> UnitStore:
    """Shards of tier "device" stay there, if ranks reach each other's; where the host steps them, it has a copy."""

    def share(count: int) -> torch.Tensor:
        return lane.lock(comm.shared_empty(count, dtype))

    one_copy = share if shared and comm.world_size > 1 else None
    reached = peers is not None or comm.world_size == 1
    stay = [bucket for bucket in geometry.every if reached and tiers[bucket.index] == "device"]
    followed = {b.index for b in stay if b.index < len(geometry.buckets) and b.index not in resident}
    alone = {b.index for b in stay} - followed  # which the host has not
    every = [b for b in geometry.every if b.index not in alone]
    trained = [b for b in geometry.buckets if b.index not in resident]
    places = ["nvme" if tiers[b.index] == "nvme" else "cpu" for b in every]
    of_host = (every, trained, places, dtype, arena, swap, one_copy, comm.rank)
    ahead = (prefetch, options.prefetch_nbytes)
    if not stay:
        how = (tiers, sections.choices, make_source(*of_host), shared, *ahead)
        return DeviceUnitStore(sections.params, geometry, comm, dtype, *how, lane=lane)
    peers = peers.duplicate() if peers is not None and resident else peers  # gradients have an order of their own
    source = DeviceSource(stay, make_source(*of_host) if every else None, followed, dtype, peers, lane)
    how = (tiers, sections.choices, source, shared, *ahead)
    return ResidentUnitStore(sections.params, geometry, comm, dtype, *how, lane=lane, peers=peers, resident=resident)
