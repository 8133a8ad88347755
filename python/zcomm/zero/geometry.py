"""Geometry: where each parameter lies in the flat index space of a ZeRO optimizer, and what this rank owns.

[Note: flat index] Parameters are dealt to units (stage 3: modules gathered together; otherwise one unit), a unit to
buckets, a bucket to ranks: rank r owns the r-th of world_size equal shards. Buckets lie one after another in the flat
index; the shards of one rank lie one after another in its shard index. Everything else (gradients, optimizer state,
files) is addressed by these two. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm.layout import BucketLayout


@dataclass(frozen=True)
class Place:
    """A parameter in its bucket: ``count`` elements from ``offset`` of bucket ``bucket``."""

    bucket: int
    offset: int
    count: int
    shape: torch.Size


@dataclass(frozen=True)
class FlatBucket:
    """``count`` elements from ``begin`` of the flat index; each rank's shard of it is ``shard_count`` elements."""

    index: int
    unit: int
    begin: int
    count: int
    shard_begin: int
    shard_count: int
    params: tuple[int, ...]

    def shard(self, rank: int) -> slice:
        """Rank's part, relative to the bucket."""
        return slice(rank * self.shard_count, (rank + 1) * self.shard_count)


class Geometry:
    """Places of the parameters of all units.

    units: for each unit the shapes of its parameters, in the order of their global numbering.
    """

    def __init__(
        self, units: Sequence[Sequence[torch.Size]], world_size: int, bucket_nbytes: int, itemsize: int
    ) -> None:
        self.world_size = world_size
        self.places: list[Place] = []
        self.buckets: list[FlatBucket] = []
        self.unit_buckets: list[range] = []
        begin = shard_begin = 0
        for unit, shapes in enumerate(units):
            layout = BucketLayout(shapes, world_size, bucket_nbytes, itemsize=itemsize)
            first_bucket, first_param = len(self.buckets), len(self.places)
            for slot in layout.slots:
                self.places.append(Place(first_bucket + slot.bucket, slot.offset, slot.count, slot.shape))
            for bucket in layout.buckets:
                shard_count = layout.shard_count(bucket.index)
                params = tuple(first_param + t for t in bucket.tensors)
                index = first_bucket + bucket.index
                self.buckets.append(FlatBucket(index, unit, begin, bucket.count, shard_begin, shard_count, params))
                begin += bucket.count
                shard_begin += shard_count
            self.unit_buckets.append(range(first_bucket, len(self.buckets)))
        self.count = begin
        self.shard_count = shard_begin

    def view(self, bucket: torch.Tensor, param: int) -> torch.Tensor:
        """Parameter ``param`` in its bucket's flat tensor, in its own shape."""
        place = self.places[param]
        return bucket[place.offset : place.offset + place.count].view(place.shape)

    def gaps(self, bucket: FlatBucket) -> Iterator[slice]:
        """The padding of ``bucket``: what no parameter covers."""
        end = 0
        for param in bucket.params:
            place = self.places[param]
            if place.offset > end:
                yield slice(end, place.offset)
            end = place.offset + place.count
        if end < bucket.count:
            yield slice(end, bucket.count)

    def runs(self, bucket: FlatBucket, part: slice, group_of: Sequence[int]) -> list[tuple[int, int, int]]:
        """``part`` of a bucket cut where the parameter group changes: (begin, end, group), relative to ``part``.

        Padding belongs to the parameter before it: its gradients are zero, so it stays zero.
        """
        runs: list[tuple[int, int, int]] = []
        for position, param in enumerate(bucket.params):
            last = position + 1 == len(bucket.params)
            low = max(self.places[param].offset, part.start)
            high = min(bucket.count if last else self.places[bucket.params[position + 1]].offset, part.stop)
            if low >= high:
                continue
            begin, end, group = low - part.start, high - part.start, group_of[param]
            if runs and runs[-1][2] == group:
                runs[-1] = (runs[-1][0], end, group)
            else:
                runs.append((begin, end, group))
        return runs
