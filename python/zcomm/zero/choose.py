"""Choice of the store of parameters and of the optimizer's arrays: by stage, tier, shared memory, device; and of the
buckets that stay on devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from zcomm import _core
from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator
from zcomm.memory.device_streams import NO_PEERS, DeviceLane, Lane
from zcomm.zero.cache.swap import AnySwap, Swap
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket, Geometry
from zcomm.zero.layout.sections import Sections
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.optim_state.device import DeviceState, StagedState
from zcomm.zero.optim_state.nvme import SwappedState
from zcomm.zero.optim_state.ram import RamState
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.options import Offload, StoredForm, Units
from zcomm.zero.params.coded_copies import CodedCopies
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.params.device_shards import DeviceShards, DeviceSource, FollowedSource
from zcomm.zero.params.shards import HostSource, host_sources
from zcomm.zero.params.sources import Sources
from zcomm.zero.params.stores import HostStore, ParameterStore, PrivateStore, SharedStore, StoreForm
from zcomm.zero.rules.rule import Rule
from zcomm.zero.units.bases import WeightBases
from zcomm.zero.units.device import DeviceMemory
from zcomm.zero.units.fillers import FromDevices, FromHost
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.host import HostMemory
from zcomm.zero.units.memory import UnitPlan
from zcomm.zero.units.store import UnitStore
from zcomm.zero.update_hooks import UpdateHooks

logger = logging.getLogger("zcomm")


def state_tiers(sections: Sections, geometry: Geometry, offload: Offload, on_device: bool) -> list[str]:
    """Return the tier of each trained bucket.

    With a device, ``fraction`` of tier "cpu" counts whole buckets: the first ones that fit into the rest stay on the
    device. Their gradients arrive last, and their weights are needed first.
    """
    tiers = [sections.list[bucket.section].state for bucket in geometry.buckets]
    if not on_device or offload.optimizer != "cpu":
        return tiers
    rest = round((1.0 - offload.fraction) * sum(bucket.count for bucket in geometry.buckets))
    for bucket in geometry.buckets:
        rest -= bucket.count
        if rest < 0:
            break
        tiers[bucket.index] = "device"
    return tiers


def reach(wanted: frozenset[int], shards: bool, comms: MeshComms, lane: Lane) -> tuple[frozenset[int], MeshComms]:
    """Choose which of the ``wanted`` buckets stay on devices. Join these devices: their communicators are the
    ``peers`` of the returned ``comms``.

    shards: parameters' shards are to stay on devices, too. Collective.
    """
    comm = comms.world
    if not isinstance(lane, DeviceLane) or comm.world_size == 1 or not (wanted or shards):
        return (wanted if lane.on_device else frozenset()), comms
    groups = (comms.shard, comms.across if wanted else None)
    found = [NO_PEERS if group is None or group.world_size == 1 else lane.reach(group) for group in groups]
    peers, across = (NO_PEERS if each is None else each for each in found)
    joined = replace(comms, peers=peers, peers_across=across)
    able = torch.tensor([None not in found], dtype=torch.int32)
    if comms.shard is not comm:
        comm.all_reduce(able, op="min", name="devices that reach each other")
    if able:
        lane.peers = joined.joins
        return wanted, joined
    for join in joined.joins:
        join.close()
    if shards and comm.rank == 0:
        logger.warning(
            "stage 3: shards that are not offloaded are in host memory, for %s and the devices of the other ranks do "
            "not reach each other (several hosts, no peer access, or ranks that do not share memory), nor does NCCL",
            lane.core.name,
        )
    return frozenset(), comms


@dataclass(frozen=True)
class StorePlan:
    """Arguments of a store of parameters.

    shared: ranks of a host share memory. lane: of the model's device. on_device: buckets with weights and state only on
    the ranks' devices. updates: when the updates of buckets run. host_ranks: see UnitPlan.
    """

    sections: Sections
    geometry: Geometry
    comms: MeshComms
    dtype: torch.dtype
    shared: bool
    prefetch: int
    units: Units
    arena: _core.PinnedArena
    swap: AnySwap
    lane: Lane
    updates: UpdateHooks
    on_device: Collection[int]
    host_ranks: int
    codec: Codec | None = None  # of gathered weights, for a model on the CPU
    differences: bool = False  # the codec is of differences to the weights that were sent last
    stored: StoredForm | None = None

    @property
    def comm(self) -> Communicator:
        """The shard group."""
        return self.comms.shard

    @property
    def tiers(self) -> list[str]:
        """The tier of the weights of each bucket."""
        return [self.sections.list[bucket.section].weights for bucket in self.geometry.every]

    def host_sources(
        self,
        every: Sequence[FlatBucket],
        trained: Sequence[FlatBucket],
        tiers: Sequence[str],
        share: Callable[[int], torch.Tensor] | None = None,
    ) -> dict[int, HostSource]:
        """See ``shards.host_sources``."""
        places = (self.dtype, self.arena, self.swap)
        if self.stored is not None:
            return self.stored.sources(self.geometry, self.sections.names, every, tiers, *places)
        return host_sources(every, trained, tiers, *places, share)


def make_store(plan: StorePlan) -> ParameterStore:
    """Build the store of the parameters. Collective."""
    lane = plan.lane
    if plan.sections.by_unit:
        return _units_on_device(plan, lane) if isinstance(lane, DeviceLane) else _units_on_host(plan)
    form = StoreForm(plan.sections.local, plan.geometry, plan.comm, plan.dtype, plan.tiers)
    across = plan.comms.across if plan.comms.hpz else None
    host: HostStore
    if across is not None and plan.codec is not None:
        host = CodedCopies(form, plan.on_device, across, plan.codec)
    elif plan.shared:
        host = SharedStore(form, plan.on_device, across)
    else:
        host = PrivateStore(form, plan.on_device, plan.comms)
    if not isinstance(lane, DeviceLane):
        return host
    return DeviceStore(form, host, lane, plan.updates, plan.on_device, plan.comms.peers)


def _units(plan: StorePlan) -> UnitPlan:
    return UnitPlan(
        plan.sections.params,
        plan.geometry,
        plan.comm,
        plan.dtype,
        plan.sections.choices,
        plan.prefetch,
        plan.units.prefetch_nbytes,
        plan.host_ranks,
    )


def _units_on_host(plan: StorePlan) -> UnitStore:
    every, trained = plan.geometry.every, plan.geometry.buckets
    source = Sources(plan.host_sources(every, trained, plan.tiers), trained)
    bases = WeightBases(plan.dtype, {bucket.index for bucket in trained}, bool(plan.codec and plan.differences))
    experts = None if plan.comms.experts is None else plan.comms.experts.shard
    gather = ShardGather(plan.comm, source, plan.shared, plan.updates, plan.codec, bases, experts)
    units = _units(plan)
    return UnitStore(units, plan.tiers, gather, HostMemory(units, gather), plan.updates)


def _units_on_device(plan: StorePlan, lane: DeviceLane) -> UnitStore:
    """Keep shards of tier "device" there if the ranks' devices reach each other; the host copies those it steps."""
    geometry, tiers, on_device, peers = plan.geometry, plan.tiers, plan.on_device, plan.comms.peers
    reached = peers.world_size == plan.comm.world_size
    stay = [bucket for bucket in geometry.every if reached and tiers[bucket.index] == "device"]
    followed = {b.index for b in stay if b.index < len(geometry.buckets) and b.index not in on_device}
    alone = {b.index for b in stay} - followed  # without a copy on the host
    every = [b for b in geometry.every if b.index not in alone]
    trained = [b for b in geometry.buckets if b.index not in on_device]
    host = _shards_on_host(plan, every, trained, lane)
    if not stay:
        units, gather = _units(plan), ShardGather(plan.comm, Sources(host, trained), plan.shared, plan.updates)
        memory = DeviceMemory(units, gather, lane, home="cpu")
        always = plan.updates.in_gathers and (plan.comm.world_size > 1 or plan.updates.sees_gathers)
        memory.fillers = [FromHost(memory.units, gather, plan.dtype, lane, always)]
        return UnitStore(units, tiers, gather, memory, plan.updates)
    if on_device and peers.is_symmetric:
        peers = peers.duplicate()  # gradients need a separate order; with NCCL a device has one order for all
    shards = DeviceShards(stay, followed, plan.dtype, peers, lane)
    follow = {number: FollowedSource(host[number], shards) for number in followed}
    sources = {**host, **follow, **dict.fromkeys(alone, DeviceSource(shards))}
    units, gather = _units(plan), ShardGather(plan.comm, Sources(sources, trained), plan.shared, plan.updates)
    memory = DeviceMemory(units, gather, lane, "device", peers)
    memory.fillers = [FromHost(memory.units, gather, plan.dtype, lane), FromDevices(shards, peers, lane)]
    return UnitStore(units, tiers, gather, memory, plan.updates, on_device, [shards])


def _shards_on_host(
    plan: StorePlan, every: list[FlatBucket], trained: list[FlatBucket], lane: DeviceLane
) -> dict[int, HostSource]:
    """Build the shards in host memory. Ranks of a host share one page-locked copy if possible. Collective."""

    def share(count: int) -> torch.Tensor:
        return lane.lock(plan.comm.shared_empty(count, plan.dtype))

    places = ["nvme" if plan.tiers[b.index] == "nvme" else "cpu" for b in every]
    one_copy = share if plan.shared and plan.comm.world_size > 1 and not plan.updates.in_gathers else None
    return plan.host_sources(every, trained, places, one_copy)


def make_state(
    counts: Sequence[int],
    tiers: Sequence[str],
    dtype: torch.dtype,
    rule: Rule,
    arena: _core.PinnedArena,
    swap: AnySwap,
    fraction: float,
    lane: Lane,
    on_device: Collection[int],
) -> OptimState:
    """Build the state of the optimizer's arrays.

    counts, tiers: of each trained bucket's shard. lane: of the model's device. If that is the CPU, its memory is
    both "device" and "cpu". on_device: numbers of the buckets with weights and gradients on the device, too.
    """
    there = [lane.on_device and tier == "device" for tier in tiers]
    here = [0 if at else count for count, at in zip(counts, there, strict=True)]
    if lane.on_device and "nvme" not in tiers:
        fraction = 1.0  # ``tiers`` already accounts for it
    host: RamState | SwappedState
    if isinstance(swap, Swap) and "nvme" in tiers and TileForm(rule.arrays, dtype, rule.state_dtype).element_nbytes:
        host = SwappedState(here, tiers, dtype, rule, arena, swap, fraction)
    else:
        host = RamState(here, tiers, dtype, rule, arena, fraction)
    place_of: dict[int, DeviceState] = {}
    for kind, inside in ((StagedState, False), (DeviceState, True)):
        theirs = [number for number, at in enumerate(there) if at and (number in on_device) == inside]
        if isinstance(lane, DeviceLane) and theirs:
            own = [count if number in theirs else 0 for number, count in enumerate(counts)]
            place_of |= dict.fromkeys(theirs, kind(own, dtype, rule, lane))
    return OptimState(host, place_of)
