"""Which state keeps an optimizer's arrays: by tier of each bucket, by device."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.optim_state.nvme import SwappedState
from zcomm.zero.optim_state.ram import RamState, ShardState
from zcomm.zero.optim_state.staged import StagedState
from zcomm.zero.optim_state.tiered import TieredState
from zcomm.zero.rules.rule import Rule


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
