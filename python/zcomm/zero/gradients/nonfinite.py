"""Search for the gradient that is not finite: the first parameter, in the model's order, among all ranks' shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.layout.flat import Geometry


@dataclass(frozen=True)
class NonFinite:
    """A gradient that was not finite. step: optimizer step, from 1, skipped ones included. parameter: its name."""

    step: int
    parameter: str


def find_nonfinite(sums: Accumulators, geometry: Geometry, comm: Communicator, names: Sequence[str]) -> str:
    """Name the first parameter with a gradient that is not finite. Collective; some rank's shard must hold one."""
    sums.finish()
    bad = _bad(sums, geometry, comm.rank)
    first = torch.tensor([min(bad, default=geometry.trained_count)])
    comm.all_reduce(first, op="min", name="first non-finite gradient")
    number = int(first)
    return names[number] if number < geometry.trained_count else "none that is left"


def _bad(sums: Accumulators, geometry: Geometry, rank: int) -> list[int]:
    found = []
    for bucket in geometry.buckets:
        shard, own = sums.shard(bucket), bucket.shard(rank)
        if bool(torch.isfinite(shard).all()):
            continue
        for index in bucket.params:
            place = geometry.places[index]
            low, high = max(place.offset, own.start), min(place.offset + place.count, own.stop)
            if low < high and not bool(torch.isfinite(shard[low - own.start : high - own.start]).all()):
                found.append(index)
    return found
