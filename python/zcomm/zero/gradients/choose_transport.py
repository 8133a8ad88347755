"""Choice of each bucket's transport, by the device and the tiers of its optimizer state and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.cache.swap import AnySwap, Swap
from zcomm.zero.gradients.accumulators import Accumulators, SwappedAccumulators
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.device_sums import DeviceSumsTransport
from zcomm.zero.gradients.host import HostTransport, shared_slots
from zcomm.zero.gradients.last_pass import LastPassTransport
from zcomm.zero.gradients.norm import DeviceSquares, NoSquares, PassSquares
from zcomm.zero.gradients.peers import DeviceTransport
from zcomm.zero.gradients.pinned import D2HPath, D2HTransport
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.gradients.swapped import D2HSwappedTransport, SingleRankTransport, SwappedTransport
from zcomm.zero.gradients.transport import ReducePlan, Transport, slot_count
from zcomm.zero.gradients.used_up import UsedUpTransport
from zcomm.zero.update_hooks import UpdateHooks


def on_host(
    plan: ReducePlan,
    arena: _core.PinnedArena,
    updates: UpdateHooks,
    swap: AnySwap,
    rows: Mapping[int, Transport],
) -> Accumulators:
    """Build the accumulators of a model on the CPU. updates: may use sums up. swap: holds the sums, with a ring in the
    arena. rows: of the buckets that are reduced as rows. Collective."""
    count = len(plan.geometry.buckets)
    keeps = plan.comm._core.reads_own_parts
    if not isinstance(swap, Swap) or not count:
        of = dict(rows)
        for part, every in plan.by_placement:
            buckets = [bucket for bucket in every if bucket.index not in rows]
            host = HostTransport(part, buckets, shared_slots(part, buckets, slot_count(len(buckets))), keeps)
            of |= dict.fromkeys((bucket.index for bucket in buckets), host)
        return Accumulators(plan, [of[bucket.index] for bucket in plan.geometry.buckets])
    ring, alone = SumRing(plan.order, arena, swap, updates), plan.comms.world.world_size == 1
    swapped = SingleRankTransport(plan, ring) if alone else SwappedTransport(plan, plan.slot_count, keeps, ring)
    return SwappedAccumulators(plan, [swapped] * count, ring)


def on_device(
    plan: ReducePlan,
    lane: DeviceLane,
    stays: Collection[int],
    weights_ready: Any,
    arena: _core.PinnedArena,
    locked: bool,
    updates: UpdateHooks,
    swap: AnySwap,
    single_pass: bool,
    last_pass: bool,
    device_sums: bool = False,
    used_up: bool = False,
) -> Accumulators:
    """Build the accumulators of a model on the lane's device. Collective.

    stays: numbers of the buckets that stay on the device. weights_ready: see D2HPath. locked: the host's accumulators
    are page-locked, for a step on the device. updates: may use sums up. swap: holds the sums of the other buckets, with
    a ring in the arena. single_pass: a step has one pass, and updates take gradients of ``plan.dtype`` ([Note: single
    pass]). last_pass: updates add the gradients of the last of several passes ([Note: last pass]). device_sums: add up
    on the device, in a world of one ([Note: sums on a device]). used_up: updates use gradients up in their slots
    ([Note: gradients that are used up]).
    """
    leave = [bucket for bucket in plan.order if bucket.index not in stays]
    stay = [bucket for bucket in plan.order if bucket.index in stays]
    slots = DeviceSlots(plan, lane)
    transport_of: dict[int, Transport] = {}
    squares, ring = NoSquares(), None
    if leave and isinstance(swap, Swap):
        ring = SumRing(leave, arena, swap, updates)
        swapped = D2HSwappedTransport(D2HPath(plan, leave, slots, lane, weights_ready, squares), ring)
        transport_of |= dict.fromkeys((bucket.index for bucket in leave), swapped)
    elif leave:
        alone = plan.comms.world.world_size == 1
        squares = PassSquares(DeviceSquares(lane, arena), of_sums=device_sums) if alone else squares
        path = D2HPath(plan, leave, slots, lane, weights_ready, squares)
        if used_up:
            pinned: Transport = UsedUpTransport(path, updates)
        elif device_sums:
            pinned = DeviceSumsTransport(path)
        elif alone and not locked and (single_pass or last_pass):
            pinned = LastPassTransport(path, single_pass, last_pass)
        else:
            pinned = D2HTransport(path)
        transport_of |= dict.fromkeys((bucket.index for bucket in leave), pinned)
        if locked:
            lane.lock(pinned.flat)
    if stay:
        there = DeviceTransport(plan, stay, slots, lane)
        transport_of |= dict.fromkeys((bucket.index for bucket in stay), there)
    transports = [transport_of[bucket.index] for bucket in plan.geometry.buckets]
    if ring is not None:
        return SwappedAccumulators(plan, transports, ring, [slots])
    return Accumulators(plan, transports, [slots], squares)
