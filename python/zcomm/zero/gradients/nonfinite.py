"""Which gradient is not finite: the first parameter, in the model's order, among all ranks' shards."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from zcomm.zero.assemble import Parts
    from zcomm.zero.optimizer import ZeroOptimizer


@dataclass(frozen=True)
class NonFinite:
    """step: optimizer step, from 1, skipped ones included. parameter: its name."""

    step: int
    parameter: str


def find(parts: Parts, step: int) -> NonFinite:
    """Collective; some rank's shard must hold an infinity or NaN."""
    parts.reducer.finish()
    first = torch.tensor([min(_bad(parts), default=parts.geometry.trained_count)])
    parts.comm.all_reduce(first, op="min", name="first non-finite gradient")
    number = int(first)
    return NonFinite(step, parts.names[number] if number < parts.geometry.trained_count else "none that is left")


def report(optimizer: ZeroOptimizer, parts: Parts) -> None:
    """Find the parameter; say so each time where the step is skipped, elsewhere once. Collective."""
    first_time = optimizer.nonfinite is None
    found = optimizer.nonfinite = find(parts, optimizer.step_count)
    if parts.comm.rank != 0 or not (first_time or optimizer.skip_nonfinite):
        return
    scale = f"; loss scale {optimizer.loss_scale:g}, step skipped"
    what = scale if optimizer.scaler else "; step skipped" if optimizer.skip_nonfinite else ""
    logging.getLogger("zcomm").warning("step %d: the gradient of %s is not finite%s", found.step, found.parameter, what)


def _bad(parts: Parts) -> list[int]:
    found = []
    for bucket in parts.geometry.buckets:
        shard, own = parts.reducer.shard_view(bucket), bucket.shard(parts.comm.rank)
        if bool(torch.isfinite(shard).all()):
            continue
        for index in bucket.params:
            place = parts.geometry.places[index]
            low, high = max(place.offset, own.start), min(place.offset + place.count, own.stop)
            if low < high and not bool(torch.isfinite(shard[low - own.start : high - own.start]).all()):
                found.append(index)
    return found
