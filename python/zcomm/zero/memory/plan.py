"""MemoryPlan: the bytes that a ZeroOptimizer of given options will hold, laid out as ``build_parts`` lays it out.

The numbers equal ``opt.memory()``, including padding, slots and windows. Each class that holds memory has a function of
its sizes (``plan_nbytes``), which its constructor uses, too. Only shapes are read: a model on the meta device will do.
Pure arithmetic: no ranks, no memory. For ranks of one host. A model is on the CPU, or on devices with all optimizer
state offloaded, and in stage 3 all weights, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from zcomm import _core
from zcomm.comm.bucket_layout import ALIGN
from zcomm.comm.codec import Compression
from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.cache.span_cache import windows_nbytes
from zcomm.zero.gradients.coded import planned_nbytes
from zcomm.zero.gradients.pinned import host_slots
from zcomm.zero.gradients.sum_ring import RING, ring_nbytes
from zcomm.zero.gradients.transport import slot_count
from zcomm.zero.groups.compression import EXACT, align_of
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.placement import over_all
from zcomm.zero.layout.sections import Sections, frozen_of
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.usage import Memory, count_also, count_versions, empty_memory, integer_nbytes
from zcomm.zero.optim_state import nvme, ram
from zcomm.zero.optim_state.nvme import WINDOWS as STATE_WINDOWS
from zcomm.zero.options import Offload, Precision, Units, check_device_sums, shares_weights
from zcomm.zero.params.shards import WINDOWS as PARAM_WINDOWS
from zcomm.zero.rows.blocks import matrices_nbytes, slots_nbytes
from zcomm.zero.schedule.whole import matrix_batches
from zcomm.zero.units import device, fillers
from zcomm.zero.units import host as unit_slots
from zcomm.zero.units.bases import buckets_of
from zcomm.zero.units.memory import make_units


@dataclass(frozen=True)
class Settings:
    """Options of a ZeroOptimizer that decide its memory. form: of its state. shared: the ranks share one host's memory.
    matrices: by id(), parameters that are updated as whole matrices: see ``Rule.matrix_nbytes``. on_device: the model
    is on a device. single_pass: steps have one pass, and no fp32 sums ([Note: single pass]). last_pass: updates add the
    gradients of the last of several passes ([Note: last pass]). device_room: bytes for the optimizer on the device; 0:
    unknown. world_size: ranks of a shard group. hops: sums over it are not the means yet ([Note: groups]). compression:
    of gradients; across: ranks along "replicate", each in a group of its own. groups: shard groups that
    divide the state of a shard among them ([Note: hpZ])."""

    stage: int
    offload: Offload
    world_size: int
    precision: Precision
    form: TileForm
    bucket_mb: float
    prefetch: int
    units: Units
    shared: bool = True
    matrices: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    on_device: bool = False
    single_pass: bool = False
    last_pass: bool = False
    device_room: int = 0
    hops: bool = False
    compression: Compression = EXACT
    across: int = 1
    groups: int = 1


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a rank holds, by tier and purpose. count: elements of all buckets.

    gathered_nbytes: from the drive in a forward. Tied weights in a unit of their own count once for each of their
    modules. trained_nbytes: weights on the drive that an update changes. held: by place of updates and purpose, bytes
    that an update finds in windows and does not read, the mean of two steps. largest_unit_nbytes,
    largest_bucket_nbytes: weights of the largest one, of all ranks. mapped_nbytes: bytes that the kernel counts for
    this process beyond ``memory`` ([Note: mapped memory]). matrices_nbytes: next to ``memory``, in a step: matrices
    that are whole, and parts of others.

    [Note: mapped memory] The process's resident memory (VmRSS) counts a page of shared memory at each address that it
    has been used at, and in each rank. Units are filled at the addresses of a slot, and used at their own. Shared
    weights are updated at one place, and seen at another. Slots of buckets, and private copies of weights, are read by
    all ranks.
    """

    memory: Memory
    count: int
    gathered_nbytes: int
    largest_unit_nbytes: int
    largest_bucket_nbytes: int
    mapped_nbytes: int = 0
    matrices_nbytes: int = 0
    trained_nbytes: int = 0
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def plan_memory(model: nn.Module, settings: Settings, trained: Sequence[nn.Parameter] | None = None) -> MemoryPlan:
    """Lay out ``model`` as ZeroOptimizer would. trained: None: parameters that require gradients.

    Raises: ValueError for units that the model does not have, or that cannot be split, for state left on a device, and
    as ``check_device_sums``.
    """
    stage, where, world_size, units = settings.stage, settings.offload, settings.world_size, settings.units
    there = settings.on_device
    kind, form = settings.precision, settings.form
    item = kind.param_nbytes
    shared, ranks_of_a_copy = settings.shared, world_size if settings.shared else 1
    check_device_sums(where, there, world_size)
    sections, geometry = lay_out(model, settings, trained)
    if there:
        _check_offloaded(sections, where, stage)
    by_unit = sections.by_unit
    found = empty_memory()
    largest, swapped = max((bucket.count for bucket in geometry.buckets), default=0), where.gradients == "nvme"
    host = "cpu" if there else "device"  # for a model on the CPU that is host memory
    slot, slots = largest * kind.communication_dtype.itemsize, slot_count(len(geometry.buckets))
    device_sums = where.gradients == "device"
    alone = there and world_size == 1 and not swapped and not device_sums
    used_up = alone and where.update == "backward"  # in host slots
    once, gradient = alone and settings.single_pass and not used_up, kind.communication_dtype.itemsize
    if there:
        found["device"]["slots"] = slots * slot
        host_count = 0 if once or device_sums else slots if swapped else host_slots(len(geometry.buckets), slot)
        each_its_own = alone and settings.last_pass and not once and not used_up
        found["cpu"]["slots"] = gradient * geometry.shard_count if each_its_own else host_count * slot
    elif world_size > 1 or settings.hops or not swapped:  # one rank needs no slots next to the ring
        found["device"]["slots"] = slots * slot
    mapped = found[host]["slots"] * (world_size - 1) // world_size if shared else 0
    tier = "nvme" if swapped else host
    found[tier]["gradients"] = 0 if used_up else (gradient if once else 4) * geometry.shard_count * settings.groups
    found["device"]["gradients"] += 4 * geometry.shard_count if device_sums else 0
    if settings.compression.gradients is not None and not there:
        codec, far = settings.compression, settings.compression.error_tier == "nvme"
        inner = world_size > 1 and (settings.across == 1 or codec.hops == "all")
        errors_nbytes, _, window_nbytes = planned_nbytes(codec, geometry.buckets, settings.across, inner)
        count_also(found, "errors", "nvme" if far else "device", errors_nbytes)
        found["cpu"]["slots"] += window_nbytes if far else 0
    if swapped:
        found["cpu"]["slots"] += ring_nbytes([bucket.shard_count for bucket in geometry.buckets])
    tiers = [sections.list[bucket.section].weights for bucket in geometry.every]
    one_copy = shares_weights(stage, shared) and not by_unit
    for tier in set(tiers):
        mine = [bucket for bucket, other in zip(geometry.every, tiers, strict=True) if other == tier]
        sharers = ranks_of_a_copy if one_copy else 1
        kept = sum(bucket.shard_count if by_unit else bucket.count for bucket in mine)
        nbytes = kept * item // sharers
        if where.stored is not None and tier != "device":
            nbytes = sum(where.stored.nbytes(bucket, geometry, sections.names, item) for bucket in mine)
        if settings.groups > 1 and settings.compression.weights is not None:  # [Note: encoded copies]
            nbytes += sum(bucket.shard_count for bucket in mine) * item
        found[host if tier == "device" else tier]["parameters"] += nbytes
        if one_copy:
            mapped += kept * item
        elif shared and not by_unit:  # an all_gather reads the other ranks' parts in place
            mapped += kept * item * (world_size - 1) // world_size
    whole_frozen = 0 if stage == 3 else sum(param.numel() for param in frozen_of(model, sections.params))
    found["device"]["parameters"] += whole_frozen * item + integer_nbytes(model)
    if there and not by_unit:
        found["device"]["parameters"] += geometry.count * item
    if by_unit:
        in_gathers = where.step_behind_forward or where.update in ("forward", "backward")
        late = in_gathers or (where.update == "auto" and sections.trains_from_nvme)
        every = make_units(sections.choices, geometry, item)
        if settings.compression.differences and not (there or shared) and world_size > 1:
            count_also(found, "bases", "device", item * sum(bucket.count for bucket in buckets_of(every)))
        ahead = (settings.prefetch, units.prefetch_nbytes)
        shapes, page = sections.row_shapes, _core.page_nbytes()
        passing = slots_nbytes(shapes, item, page) + matrices_nbytes(shapes, item, page)
        if there:
            found["device"]["slots"] += device.plan_nbytes(every, *ahead) + slots_nbytes(shapes, item)
            late = late and (world_size > 1 or where.update == "backward")
            if ranks_of_a_copy < world_size or "nvme" in tiers or late:
                passing += fillers.plan_nbytes([unit.nbytes for unit in every if not unit.by_rows])
        else:
            unit_slots.round_up(every)
            passing += unit_slots.plan_nbytes(every, *ahead)
        found[host]["slots"] += passing // ranks_of_a_copy
        mapped += passing
        on_drive = [b.shard_count for b, tier in zip(geometry.every, tiers, strict=True) if tier == "nvme"]
        found["cpu"]["slots"] += windows_nbytes(max(on_drive, default=0) * item, len(on_drive), PARAM_WINDOWS)
    state = _add_state(found, sections, geometry, where.fraction, form)
    if where.atomic:
        _add_versions(found, [tiers[bucket.index] for bucket in geometry.buckets], geometry, item)
    in_units = [sum(geometry.every[bucket].count for bucket in buckets) for buckets in geometry.unit_buckets]
    drive = [bucket for bucket, tier in zip(geometry.every, tiers, strict=True) if tier == "nvme"]
    gathered = sum(bucket.shard_count * item * sections.choices[bucket.unit].uses for bucket in drive)
    for unit, choice in enumerate(sections.choices):
        if choice.by_rows:  # at most one block of it is gathered, and at most one bucket of its gradient
            in_units[unit] = max((geometry.every[bucket].count for bucket in geometry.unit_buckets[unit]), default=0)
    largest_unit = max(in_units, default=0) * item if by_unit else 0
    matrices = _matrices_nbytes(sections, geometry, settings)
    weights = [bucket.shard_count * item for bucket in geometry.buckets if tiers[bucket.index] == "nvme"]
    sums = [4 * bucket.shard_count for bucket in geometry.buckets] if swapped else []
    by_rows = [number for number, bucket in enumerate(geometry.buckets) if bucket.block]
    held, trained_nbytes = _held(state, weights, sums, by_rows), sum(weights)
    at_most = (largest_unit, largest * item, mapped, matrices)
    return MemoryPlan(found, geometry.count, gathered, *at_most, trained_nbytes, held)


def lay_out(
    model: nn.Module, settings: Settings, trained: Sequence[nn.Parameter] | None = None
) -> tuple[Sections, Geometry]:
    """Return the sections and places of the parameters. trained, raises: as ``plan_memory``."""
    stage, item = settings.stage, settings.precision.param_nbytes
    if trained is None:
        trained = [param for param in model.parameters() if param.requires_grad]
    frozen = frozen_of(model, trained) if stage == 3 else []
    how = (stage, settings.offload, settings.shared, settings.units, settings.on_device, item)
    placements = over_all((*trained, *frozen), settings.world_size * settings.groups, 0, settings.groups)
    sections = Sections(model, trained, frozen, placements, *how)
    align = align_of(settings.compression, STATE_BLOCK if settings.form.coded else ALIGN)
    bucket_nbytes = int(settings.bucket_mb * 2**20)
    return sections, sections.geometry(bucket_nbytes, item, align, settings.matrices)


def _matrices_nbytes(sections: Sections, geometry: Geometry, settings: Settings) -> int:
    """Return the most bytes that a batch of matrices needs in a step ([Note: whole matrices])."""
    every = {index: settings.matrices.get(id(param)) for index, param in enumerate(sections.params)}
    sizes = {index: size for index, size in every.items() if size is not None}
    world_size, most = settings.world_size, 0
    for order in (geometry.buckets, geometry.buckets[::-1]):
        for batch in matrix_batches(order, sizes, world_size):
            mine = [sizes[index] for bucket in batch for index in bucket.params if index in sizes]
            kept = sum(whole for whole, _ in mine) // world_size
            now = max((beside + (whole if world_size > 1 else 0) for whole, beside in mine), default=0)
            most = max(most, kept + now)
    return most


def _check_offloaded(sections: Sections, offload: Offload, stage: int) -> None:
    """Raise ValueError if state, or in stage 3 a weight, stays on the device."""
    stays = any((s.trained and s.state == "device") or (stage == 3 and s.weights == "device") for s in sections.list)
    if stays or (offload.optimizer == "cpu" and offload.fraction < 1.0):
        raise ValueError(
            "a limit on host memory, for a model on a device, needs all optimizer state offloaded, and in stage 3 all "
            "parameters: give offload='cpu' or 'nvme'"
        )


def _held(
    state: Sequence[int], weights: Sequence[int], sums: Sequence[int], by_rows: Collection[int]
) -> dict[str, dict[str, int]]:
    """Return ``MemoryPlan.held``. state, weights, sums: bytes of spans and of shards on the drive, in order. by_rows:
    sums of blocks, which come from the first to the last.

    Windows are used in turn. ``step()`` alternates its direction, so it begins with the windows that the last step
    left. Updates elsewhere go one way, in backward from the last to the first. Backward ends with the sums of the first
    buckets.
    """
    first = sum(nbytes for number, nbytes in enumerate(sums[:RING]) if number not in by_rows)
    alone = _alone(sums, RING)
    return {
        "step": {
            "optimizer": (sum(state[:STATE_WINDOWS]) + sum(state[-STATE_WINDOWS:])) // 2,
            "parameters": (sum(weights[:PARAM_WINDOWS]) + sum(weights[-PARAM_WINDOWS:])) // 2,
            "gradients": (first + alone) // 2,
        },
        "forward": {"optimizer": _alone(state, STATE_WINDOWS), "gradients": first},
        "backward": {"optimizer": _alone(state, STATE_WINDOWS), "parameters": _alone(weights, PARAM_WINDOWS)},
    }


def _alone(sizes: Sequence[int], windows: int) -> int:
    """Return the bytes of spans that share their window with no other one."""
    return sum(sizes[max(0, len(sizes) - windows) : windows])


def _add_state(found: Memory, sections: Sections, geometry: Geometry, fraction: float, form: TileForm) -> list[int]:
    """Add optimizer state. Returns: bytes of its spans on the drive."""
    counts = [bucket.shard_count for bucket in geometry.buckets]
    tiers = [sections.list[bucket.section].state for bucket in geometry.buckets]
    if "nvme" not in tiers or not form.element_nbytes:
        by_tier, sizes = ram.plan_nbytes(counts, tiers, form, fraction), []
    else:
        spans, is_swapped = nvme.place(counts, tiers, fraction)
        by_tier = nvme.nbytes_by_tier(spans, is_swapped, tiers, form)
        sizes = [form.nbytes(span[2]) for span, on_drive in zip(spans, is_swapped, strict=True) if on_drive]
    for tier, nbytes in by_tier.items():
        found[tier]["optimizer"] += nbytes
    found["cpu"]["slots"] += windows_nbytes(max(sizes, default=0), len(sizes), STATE_WINDOWS)
    return sizes


def _add_versions(found: Memory, tiers: Sequence[str], geometry: Geometry, item: int) -> None:
    """Add second versions of trained weights, shards in the ``tiers`` of their buckets, and of all state."""
    sizes = [bucket.shard_count * item for bucket in geometry.buckets]
    drive = found["nvme"]["optimizer"] + sum(s for s, tier in zip(sizes, tiers, strict=True) if tier == "nvme")
    everything = sum(sizes) + sum(found[tier]["optimizer"] for tier in found)
    count_versions(found, drive, everything - drive)
