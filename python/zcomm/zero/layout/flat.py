"""Geometry: where each parameter lies in the flat index space of a ZeRO optimizer, and what this rank owns.

[Note: flat index] Parameters are dealt to sections (sections.py: trained or frozen, of one unit, of one tier), a
section to buckets, a bucket to ranks. Rank r owns the r-th of world_size equal shards. Buckets lie one after another in
the flat index, trained ones first; the shards of one rank lie one after another in its shard index. Everything else
(gradients, optimizer state, files) is addressed by these two. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm.comm.bucket_layout import ALIGN, BucketLayout

FIRST_NBYTES = 1 << 20
ALL = slice(None)  # of a shard


@dataclass(frozen=True)
class Place:
    """A parameter in its bucket: ``count`` elements from ``offset`` of bucket ``bucket``."""

    bucket: int
    offset: int
    count: int
    shape: torch.Size

    def within(self, part: slice) -> tuple[int, int]:
        """Return begin and end in the bucket of its elements in ``part`` of that; begin >= end: it has none there."""
        return max(self.offset, part.start), min(self.offset + self.count, part.stop)


@dataclass(frozen=True)
class FlatBucket:
    """``count`` elements from ``begin`` of the flat index; each rank's shard of it is ``shard_count`` elements."""

    index: int
    section: int
    unit: int
    begin: int
    count: int
    shard_count: int
    params: tuple[int, ...]

    def shard(self, rank: int) -> slice:
        """Return the part of ``rank``, relative to the bucket."""
        return slice(rank * self.shard_count, (rank + 1) * self.shard_count)


class Geometry:
    """Places of the parameters of all sections.

    sections: for each the shapes of its parameters, in the order of their global numbering. trained: so many of the
    sections, the first ones, are trained, and the others frozen (None: all are trained). units: the unit of each (None:
    its own number), of ``unit_count``. ``buckets``, ``count`` and ``shard_count`` are those of what is trained;
    ``every`` and ``every_count`` have the frozen ones, too. align: elements; shard_align: of each section; see
    BucketLayout.
    """

    def __init__(
        self,
        sections: Sequence[Sequence[torch.Size]],
        world_size: int,
        bucket_nbytes: int,
        itemsize: int,
        *,
        trained: int | None = None,
        units: Sequence[int] | None = None,
        unit_count: int | None = None,
        align: int = ALIGN,
        shard_align: Sequence[int] | None = None,
    ) -> None:
        self.places: list[Place] = []
        self.every: list[FlatBucket] = []
        unit_of = range(len(sections)) if units is None else units
        self.unit_buckets: list[list[int]] = [[] for _ in range(len(sections) if unit_count is None else unit_count)]
        self.every_count = 0
        for section, shapes in enumerate(sections):
            first = FIRST_NBYTES if section == 0 else None  # the bucket that is reduced when backward has ended
            pad = None if shard_align is None else shard_align[section]
            layout = BucketLayout(shapes, world_size, bucket_nbytes, align, itemsize, first, pad)
            self._add(section, unit_of[section], layout)
        first_frozen = len(sections) if trained is None else trained
        self.buckets = [bucket for bucket in self.every if bucket.section < first_frozen]
        self.count = sum(bucket.count for bucket in self.buckets)
        self.shard_count = sum(bucket.shard_count for bucket in self.buckets)
        self.trained_count = sum(len(bucket.params) for bucket in self.buckets)  # parameters

    def _add(self, section: int, unit: int, layout: BucketLayout) -> None:
        first_bucket, first_param = len(self.every), len(self.places)
        for slot in layout.slots:
            self.places.append(Place(first_bucket + slot.bucket, slot.offset, slot.count, slot.shape))
        for bucket in layout.buckets:
            index, shard_count = first_bucket + bucket.index, layout.shard_count(bucket.index)
            params = tuple(first_param + t for t in bucket.tensors)
            self.unit_buckets[unit].append(index)
            self.every.append(FlatBucket(index, section, unit, self.every_count, bucket.count, shard_count, params))
            self.every_count += bucket.count

    def bucket_of(self, param: int) -> FlatBucket:
        return self.every[self.places[param].bucket]

    def is_frozen(self, param: int) -> bool:
        return param >= self.trained_count

    def view(self, bucket: torch.Tensor, param: int) -> torch.Tensor:
        """Parameter ``param`` in its bucket's flat tensor, in its own shape."""
        place = self.places[param]
        return bucket[place.offset : place.offset + place.count].view(place.shape)

    def gaps(self, bucket: FlatBucket) -> Iterator[slice]:
        """Yield the padding of ``bucket``: what no parameter covers."""
        end = 0
        for param in bucket.params:
            place = self.places[param]
            if place.offset > end:
                yield slice(end, place.offset)
            end = place.offset + place.count
        if end < bucket.count:
            yield slice(end, bucket.count)

    def runs(self, bucket: FlatBucket, part: slice, group_of: Sequence[int]) -> list[tuple[int, int, int]]:
        """Cut ``part`` of a bucket where the param group changes: (begin, end, group), relative to ``part``.

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
