"""Which store keeps the parameters: by stage, by who shares memory, by device."""

from __future__ import annotations

from collections.abc import Collection

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm.comm import Communicator
from zcomm.zero.device_units import DeviceUnitStore
from zcomm.zero.device_weights import DeviceStore
from zcomm.zero.geometry import Geometry
from zcomm.zero.parameters import ParameterStore, PrivateStore, ResidentStore, SharedStore
from zcomm.zero.resident_units import DeviceSource, ResidentUnitStore
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
        if peers is not None:
            assert lane is not None
            peers = peers.duplicate()
            source = DeviceSource(geometry.every, dtype, peers, lane)
            ahead = (prefetch, options.prefetch_nbytes)
            how = (sections.params, geometry, comm, dtype, tiers, sections.choices, source, False, *ahead)
            return ResidentUnitStore(*how, lane=lane, peers=peers, resident=resident)
        return _by_unit(sections, geometry, comm, dtype, tiers, arena, swap, shared, prefetch, options, lane)
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
    lane: DeviceLane | None,
) -> UnitStore:
    ahead = (prefetch, options.prefetch_nbytes)
    if lane is None:
        source = make_source(geometry.every, geometry.buckets, tiers, dtype, arena, swap)
        return UnitStore(sections.params, geometry, comm, dtype, tiers, sections.choices, source, shared, *ahead)

    def share(count: int) -> torch.Tensor:
        return lane.lock(comm.shared_empty(count, dtype))

    one_copy = share if shared and comm.world_size > 1 else None
    source = make_source(geometry.every, geometry.buckets, tiers, dtype, arena, swap, one_copy, comm.rank)
    how = (tiers, sections.choices, source, shared, *ahead)
    return DeviceUnitStore(sections.params, geometry, comm, dtype, *how, lane=lane)
