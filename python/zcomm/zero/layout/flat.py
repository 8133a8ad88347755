"""Geometry: the place of each parameter in the flat index space of a ZeRO optimizer, and this rank's elements.

[Note: flat index] Parameters are dealt to sections (sections.py: trained or frozen, of one unit, of one tier), a
section to buckets, a bucket to ranks. Each rank of its placement owns one of ``parts`` equal shards. Buckets lie one
after another in the flat index, trained ones first; the shards of one rank lie one after another in its shard index.
Everything else (gradients, optimizer state, files) is addressed by these two. Pure arithmetic.

[Note: blocks] A weight that is gathered by rows lies in blocks of rows, in as many buckets as they need. So no buffer
for a bucket grows with the weight. Its gradient arrives block by block, too. ``by_block`` has the same buckets with
blocks for parameters: the first block has the parameter's number, and the others follow all parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from zcomm.comm.bucket_layout import ALIGN, BucketLayout
from zcomm.zero.layout.placement import ParamGroupPlacement
from zcomm.zero.rows.blocks import RowBlock, block_rows, blocks_of_shape, row_width

FIRST_NBYTES = 1 << 20
WHOLE_SHARD = slice(None)


@dataclass(frozen=True)
class Place:
    """A parameter in its bucket: ``count`` elements from ``offset`` of bucket ``bucket``.

    If it is in blocks, the bucket is the first one; ``Geometry.spans`` has all.
    """

    bucket: int
    offset: int
    count: int
    shape: torch.Size

    def within(self, part: slice) -> tuple[int, int]:
        """Return begin and end in the bucket of its elements in ``part`` of that; begin >= end: none."""
        return max(self.offset, part.start), min(self.offset + self.count, part.stop)


@dataclass(frozen=True)
class Span:
    """The elements of a parameter in one bucket: ``count`` from its element ``begin`` on, from ``offset`` of bucket
    ``bucket``."""

    bucket: int
    offset: int
    begin: int
    count: int

    def within(self, part: slice) -> tuple[int, int]:
        """Return begin and end in the bucket, as ``Place.within``."""
        return max(self.offset, part.start), min(self.offset + self.count, part.stop)


@dataclass(frozen=True)
class FlatBucket:
    """``count`` elements from ``begin`` of the flat index, in ``parts`` equal shards; this rank keeps shard ``own``.

    first: this rank has the first copy of its shard. counted: it counts the shard in norms ([Note: groups]). groups: of
    ranks that divide a part ``held`` into shards ([Note: hpZ]). experts: see ParamGroupPlacement.
    """

    index: int
    section: int
    unit: int
    begin: int
    count: int
    parts: int
    own: int
    params: tuple[int, ...]
    block: int = 0  # elements of a block of rows, if it has blocks
    first: bool = True
    counted: bool = True
    groups: int = 1
    experts: bool = False

    @property
    def held_count(self) -> int:
        """Elements of ``held``."""
        return self.groups * self.shard_count

    @property
    def held(self) -> slice:
        """The part that this rank's shard group sums for this rank, relative to the bucket: ``part`` if there is one
        group."""
        begin = self.own // self.groups * self.held_count
        return slice(begin, begin + self.held_count)

    @property
    def of_held(self) -> slice:
        """The shard of this rank, relative to ``held``."""
        begin = self.own % self.groups * self.shard_count
        return slice(begin, begin + self.shard_count)

    @property
    def shard_count(self) -> int:
        """Elements of a shard."""
        return self.count // self.parts

    @property
    def part(self) -> slice:
        """The part that this rank keeps state of and updates, relative to the bucket."""
        return self.shard(self.own)

    def shard(self, number: int) -> slice:
        """Return part ``number``, relative to the bucket."""
        return slice(number * self.shard_count, (number + 1) * self.shard_count)


class Geometry:
    """Places of the parameters of all sections.

    sections: for each the shapes of its parameters, in the order of their global numbering. over: the placement of
    each. trained: the number of trained sections, which come first; the others are frozen (None: all are
    trained). units: the unit of each (None: its own number), of ``unit_count``. ``buckets``, ``count`` and
    ``shard_count`` are of the trained ones; ``every`` and ``every_count`` have the frozen ones, too. align: elements;
    shard_align: of each section; see BucketLayout. in_blocks: sections of one parameter each, which lies in blocks
    ([Note: blocks]).
    """

    by_block: Geometry

    def __init__(
        self,
        sections: Sequence[Sequence[torch.Size]],
        over: Sequence[ParamGroupPlacement],
        bucket_nbytes: int,
        itemsize: int,
        *,
        trained: int | None = None,
        units: Sequence[int] | None = None,
        unit_count: int | None = None,
        align: int = ALIGN,
        shard_align: Sequence[int] | None = None,
        in_blocks: Collection[int] = (),
    ) -> None:
        self.places: list[Place] = []
        self.in_blocks = frozenset(in_blocks)
        self.blocks: dict[int, list[RowBlock]] = {}  # by parameter
        self._block_places: dict[int, list[Place]] = {}
        self._spans: dict[int, list[Span]] = {}
        self._params_of: list[int] = []  # of blocks behind all parameters
        self._param_count = sum(len(shapes) for shapes in sections)
        self.by_param = self  # of ``by_block``: its source
        self.every: list[FlatBucket] = []
        unit_of = range(len(sections)) if units is None else units
        self.unit_buckets: list[list[int]] = [[] for _ in range(len(sections) if unit_count is None else unit_count)]
        self.every_count = 0
        for section, shapes in enumerate(sections):
            first = FIRST_NBYTES if section == 0 else None  # the bucket that is reduced when backward has ended
            pad = None if shard_align is None else shard_align[section]
            lie = blocks_of_shape(shapes[0], align) if section in self.in_blocks else shapes
            layout = BucketLayout(lie, over[section].state.size, bucket_nbytes, align, itemsize, first, pad)
            self._add(section, unit_of[section], layout, shapes, over[section])
        first_frozen = len(sections) if trained is None else trained
        self.buckets = [bucket for bucket in self.every if bucket.section < first_frozen]
        self.count = sum(bucket.count for bucket in self.buckets)
        self.shard_count = sum(bucket.shard_count for bucket in self.buckets)
        self.trained_count = sum(len(shapes) for shapes in sections[:first_frozen])  # parameters
        self.by_block = self._by_block() if self._block_places else self

    def _add(
        self, section: int, unit: int, layout: BucketLayout, shapes: Sequence[torch.Size], over: ParamGroupPlacement
    ) -> None:
        first_bucket, first_param = len(self.every), len(self.places)
        lie = [Place(first_bucket + slot.bucket, slot.offset, slot.count, slot.shape) for slot in layout.slots]
        if section in self.in_blocks:
            self._block_places[first_param] = lie
            lie = [replace(lie[0], count=shapes[0].numel(), shape=shapes[0])]
        self.places += lie
        for bucket in layout.buckets:
            index = first_bucket + bucket.index
            own = range(len(lie)) if section in self.in_blocks else bucket.tensors
            params = tuple(first_param + t for t in own)
            self.unit_buckets[unit].append(index)
            block = block_rows(shapes[0]) * row_width(shapes[0]) if section in self.in_blocks else 0
            place = (self.every_count, bucket.count, over.state.size, over.state.own)
            copies = (over.first, over.counted, over.groups, over.experts)
            self.every.append(FlatBucket(index, section, unit, *place, params, block, *copies))
            self.every_count += bucket.count

    def _by_block(self) -> Geometry:
        """Make ``by_block``, and find the spans of parameters in blocks, which lie in a bucket without gaps."""
        made = copy.copy(self)
        made.places, members = list(self.places), dict[int, list[int]]()
        for param, blocks in self._block_places.items():
            width, begin = row_width(self.places[param].shape), 0
            numbers = [param, *range(len(made.places), len(made.places) + len(blocks) - 1)]
            made.places[param] = blocks[0]
            made.places += blocks[1:]
            self._params_of += [param] * (len(blocks) - 1)
            self.blocks[param], spans = [], self._spans.setdefault(param, [])
            for number, block in zip(numbers, blocks, strict=True):
                self.blocks[param].append(RowBlock(number, begin, begin + block.shape[0]))
                members.setdefault(block.bucket, []).append(number)
                if block.offset == 0:
                    spans.append(Span(block.bucket, 0, begin * width, block.count))
                else:
                    assert block.offset == spans[-1].count, "blocks without gaps"
                    spans[-1] = replace(spans[-1], count=spans[-1].count + block.count)
                begin += block.shape[0]
        made.every = [
            replace(bucket, params=tuple(members[bucket.index])) if bucket.index in members else bucket
            for bucket in self.every
        ]
        made.buckets = made.every[: len(self.buckets)]
        made.by_block = made
        return made

    def spans(self, param: int) -> Sequence[Span]:
        """Return the parameter's spans, in its order: one in each of its buckets."""
        place = self.places[param]
        return self._spans.get(param) or (Span(place.bucket, place.offset, 0, place.count),)

    def span_in(self, bucket: FlatBucket, param: int) -> Span:
        """Return the span of a parameter in ``bucket``, one of its buckets."""
        return next(span for span in self.spans(param) if span.bucket == bucket.index)

    def param_of(self, number: int) -> int:
        """Return the parameter of a number of ``by_block``."""
        return number if number < self._param_count else self._params_of[number - self._param_count]

    def rows_of(self, number: int) -> slice:
        """Return the rows of its parameter that a number of ``by_block`` stands for."""
        blocks = self.blocks.get(self.param_of(number), ())
        return next((slice(block.begin, block.end) for block in blocks if block.number == number), slice(None))

    def numbers_of(self, param: int) -> list[int]:
        """Return the numbers that a parameter has in ``by_block``."""
        return [block.number for block in self.blocks[param]] if param in self.blocks else [param]

    def buckets_of(self, param: int) -> list[FlatBucket]:
        return [self.every[span.bucket] for span in self.spans(param)]

    def bucket_of(self, param: int) -> FlatBucket:
        """Return the parameter's bucket; if it is in blocks, the first one."""
        return self.every[self.places[param].bucket]

    def is_frozen(self, param: int) -> bool:
        return param >= self.trained_count

    def view(self, bucket: torch.Tensor, param: int) -> torch.Tensor:
        """Return parameter ``param`` in its bucket's flat tensor, in its own shape."""
        place = self.places[param]
        return bucket[place.offset : place.offset + place.count].view(place.shape)

    def gaps(self, bucket: FlatBucket) -> Iterator[slice]:
        """Yield the padding of ``bucket``, which no parameter covers."""
        end = 0
        for param in bucket.params:
            place = self.places[param]
            if place.offset > end:
                yield slice(end, place.offset)
            end = place.offset + place.count
        if end < bucket.count:
            yield slice(end, bucket.count)

    def runs(self, bucket: FlatBucket, part: slice, group_of: Sequence[int]) -> list[tuple[int, int, int]]:
        """Cut ``part`` of a bucket at changes of the param group: (begin, end, group), relative to ``part``.

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
