"""Bytes of one rank by tier and purpose, and of swap per step, for one case of stage, tier, world and precision.

From shapes (a model on the meta device will do) everything is laid out as ZeroOptimizer lays it out, padding, slots and
windows included. So the numbers are those of ``opt.memory()``. From a count of parameters alone it is ZeRO's formula
(memory.py), without slots. Pure arithmetic: no ranks, no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from zcomm import _core
from zcomm.comm.bucket_layout import ALIGN
from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.gradients.sum_ring import ring_nbytes
from zcomm.zero.gradients.transport import SLOTS
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.sections import Sections, frozen_of
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory import Memory, empty_memory, integer_nbytes, memory_formula
from zcomm.zero.optim_state.nvme import WINDOWS as STATE_WINDOWS
from zcomm.zero.optim_state.nvme import place
from zcomm.zero.options import Offload, Precision, Units, as_offload, as_precision, check_stage, slot_count
from zcomm.zero.params.shards import WINDOWS as PARAM_WINDOWS

ARRAYS = {"adamw": 2, "adam": 2, "adamw-8bit": 2, "lion": 1, "adagrad": 1, "sgd": 0, "sgd-momentum": 1}


@dataclass(frozen=True)
class Estimate:
    """Bytes that one case needs.

    memory: of one rank. swap_read_nbytes, swap_written_nbytes: of one rank and optimizer step (reads: at most).
    swap_param_nbytes: of these, parameters and what of gradients moves beside computing. count: elements of all
    buckets. update_nbytes: that the optimizer's pass reads and writes. tensors: trained parameters, where there is a
    model.
    """

    stage: int
    offload: str | Offload | None
    world_size: int
    memory: Memory
    swap_read_nbytes: int = 0
    swap_written_nbytes: int = 0
    activations_nbytes: int = 0
    exact: bool = True
    swap_param_nbytes: tuple[int, int] = (0, 0)
    count: int = 0
    bucket_nbytes: int = 0
    update_nbytes: int = 0
    tensors: int = 0

    def tier(self, name: str) -> int:
        """Return the bytes of a tier; activations are on the device."""
        return sum(self.memory[name].values()) + (self.activations_nbytes if name == "device" else 0)

    @property
    def host_nbytes(self) -> int:
        """Bytes that a rank needs in RAM where the device is the CPU."""
        return self.tier("device") + self.tier("cpu")


def estimate(
    model: nn.Module | int,
    stage: int,
    offload: str | Offload | None = None,
    world_size: int = 1,
    precision: str = "fp32",
    optimizer: str = "adamw",
    *,
    bucket_mb: float = 25.0,
    prefetch: int = 1,
    accumulation: int = 1,
    activations_nbytes: int = 0,
    communication_dtype: str | None = None,
    units: Units | None = None,
) -> Estimate:
    """Estimate what ``ZeroOptimizer`` of these options needs on CPU ranks of one host.

    model: a module (on any device, meta too), or the number of trained parameters.
    Raises: ValueError for an unknown stage, offload, precision or optimizer.
    """
    check_stage(stage)
    where, kind = as_offload(offload, stage), as_precision(precision, communication_dtype=communication_dtype)
    if optimizer not in ARRAYS:
        raise ValueError(f"optimizer={optimizer!r}; known here: {', '.join(ARRAYS)}")
    arrays = tuple(str(k) for k in range(ARRAYS[optimizer]))
    form = TileForm(arrays, kind.dtype, torch.uint8 if optimizer.endswith("-8bit") else torch.float32)
    if isinstance(model, int):
        size = form.state_dtype.itemsize
        memory = memory_formula(model, world_size, stage, precision, where, state_arrays=len(arrays), array_nbytes=size)
        count, exact = model, False
    else:
        units = units or Units()
        memory, count = _laid_out(model, stage, where, world_size, kind, form, bucket_mb, prefetch, units)
        exact = True
    state, params, sums = (memory["nvme"][purpose] for purpose in ("optimizer", "parameters", "gradients"))
    gathers = 2 * accumulation  # forward and backward of each micro-step
    # What moves beside computing; the update and its state come behind, unless they are in the next forward.
    behind = 0 if where.update == "forward" else params
    beside = params * gathers + sums * (accumulation - 1), sums * accumulation
    return Estimate(
        stage=stage,
        offload=offload,
        world_size=world_size,
        memory=memory,
        swap_read_nbytes=state + behind + sums + beside[0],
        swap_written_nbytes=state + params + beside[1],
        activations_nbytes=activations_nbytes,
        exact=exact,
        swap_param_nbytes=(behind + beside[0], params + beside[1]),
        count=count,
        tensors=0 if isinstance(model, int) else sum(param.requires_grad for param in model.parameters()),
        bucket_nbytes=count * kind.communication_dtype.itemsize,
        update_nbytes=_update_nbytes(count if stage == 0 else -(-count // world_size), form),
    )


def _update_nbytes(count: int, form: TileForm) -> int:
    """Return the bytes of two passes over the data of ``count`` elements.

    The norm's pass (of a step that clips) reads gradients; the update's reads gradients, weights and state, which are
    written back.
    """
    return count * (4 + 4 + 2 * form.dtype.itemsize) + 2 * form.nbytes(count)


def _laid_out(
    model: nn.Module,
    stage: int,
    where: Offload,
    world_size: int,
    kind: Precision,
    form: TileForm,
    bucket_mb: float,
    prefetch: int,
    units: Units,
) -> tuple[Memory, int]:
    """Return all memory, laid out as build_parts does, and the elements of all buckets."""
    trained = [param for param in model.parameters() if param.requires_grad]
    frozen = frozen_of(model, trained)
    sections = Sections(model, trained, frozen if stage == 3 else [], stage, where, True, units)
    item, by_unit = kind.param_nbytes, sections.by_unit
    geometry = sections.geometry(world_size, int(bucket_mb * 2**20), item, STATE_BLOCK if form.coded else ALIGN)
    found = empty_memory()
    largest, swapped = max((bucket.count for bucket in geometry.buckets), default=0), where.gradients == "nvme"
    if world_size > 1 or not swapped:  # a rank that is alone needs no slots beside the ring
        found["device"]["slots"] = min(SLOTS, len(geometry.buckets)) * largest * kind.communication_dtype.itemsize
    tier = "nvme" if swapped else "device"
    found[tier]["gradients"] = 4 * (geometry.count if stage == 0 else geometry.shard_count)
    if swapped:
        found["cpu"]["slots"] = ring_nbytes([bucket.shard_count for bucket in geometry.buckets])
    tiers = [sections.list[bucket.section].weights for bucket in geometry.every]
    for tier in set(tiers):
        mine = [bucket for bucket, other in zip(geometry.every, tiers, strict=True) if other == tier]
        sharers = 1 if by_unit or stage == 0 else world_size
        kept = sum(bucket.shard_count if by_unit else bucket.count for bucket in mine)
        found[tier]["parameters"] += kept * item // sharers
    whole_frozen = 0 if stage == 3 else sum(param.numel() for param in frozen)
    found["device"]["parameters"] += whole_frozen * item + integer_nbytes(model)
    if by_unit:
        ahead = (prefetch, units.prefetch_nbytes)
        found["device"]["slots"] += _unit_slots(sections, geometry, item, ahead) // world_size
        on_drive = [b.shard_count for b, tier in zip(geometry.every, tiers, strict=True) if tier == "nvme"]
        found["cpu"]["slots"] += PARAM_WINDOWS * _pages(max(on_drive, default=0) * item)
    _add_state(found, sections, geometry, stage, where.fraction, form)
    return found, geometry.count


def _unit_slots(sections: Sections, geometry: Geometry, item: int, ahead: tuple[int, int | None]) -> int:
    """Return the bytes of unit slots, of which the ranks of a host share one copy."""
    nbytes = [_pages(sum(geometry.every[b].count for b in buckets) * item) for buckets in geometry.unit_buckets]
    keeps = [number == 0 or choice.keep for number, choice in enumerate(sections.choices)]
    blocks = [size for size, keep in zip(nbytes, keeps, strict=True) if not keep]
    kept = sum(size for size, keep in zip(nbytes, keeps, strict=True) if keep)
    return slot_count(blocks, *ahead) * max(blocks, default=0) + kept


def _add_state(
    found: Memory, sections: Sections, geometry: Geometry, stage: int, fraction: float, form: TileForm
) -> None:
    counts = [bucket.count if stage == 0 else bucket.shard_count for bucket in geometry.buckets]
    tiers = [sections.list[bucket.section].state for bucket in geometry.buckets]
    on_device = form.nbytes(sum(count for count, tier in zip(counts, tiers, strict=True) if tier == "device"))
    offloaded = form.nbytes(sum(counts)) - on_device
    if "nvme" not in tiers or not form.element_nbytes:
        kept = round(offloaded * fraction)
        found["cpu"]["optimizer"] += kept
        found["device"]["optimizer"] += on_device + offloaded - kept
        return
    spans, is_swapped = place(counts, tiers, fraction)
    swapped = [count for (_, _, count), on_drive in zip(spans, is_swapped, strict=True) if on_drive]
    on_drive = form.nbytes(sum(swapped))
    found["nvme"]["optimizer"] += on_drive
    found["cpu"]["optimizer"] += offloaded - on_drive
    found["device"]["optimizer"] += on_device
    windows = min(STATE_WINDOWS, len(swapped))
    found["cpu"]["slots"] += windows * _pages(form.nbytes(max(swapped, default=0)))


def _pages(nbytes: int) -> int:
    page = _core.page_nbytes()
    return -(-nbytes // page) * page
