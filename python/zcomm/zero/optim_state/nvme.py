"""Optimizer state on NVMe: spans of tiles READ -> step -> WRITE through the windows of a SpanCache.

[Note: swapped step] A tile is TILE_COUNT elements with all of their state (layout/tiles.py). A span is SPAN_TILES tiles
of a shard: one key of the swap file and one call of the rule. It is an item of the cache ([Note: span cache]). Keys are
of whole pages ([Note: whole pages]): bytes behind a span in its last page are not used.
Half of the windows read ahead, the others write back, so that 16 MiB of each are in flight (fp32 Adam). The last writes
run concurrently with the next forward.
Updates alternate their direction. The next one begins with the spans that the last one left in the windows: these need
not be read. A fraction below 1 keeps evenly spread spans in RAM: the step works on them while the next ones are read.
Outside of a step a span is written after its last tile, or when its window is needed for another one.
Source: ZeRO-Infinity (arXiv:2104.07857) section 5.1; decision D8.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.span_cache import SpanCache, Sweep, whole_pages
from zcomm.zero.cache.swap import Swap, SwapCopy
from zcomm.zero.layout import tiles
from zcomm.zero.layout.tiles import TileForm, cut
from zcomm.zero.optim_state.ram import Held, ShardState, ShardStep
from zcomm.zero.rules.rule import Rule

Span = tuple[int, int, int]  # bucket, first element of its shard, count


class Spans:
    """The spans of shards of ``counts`` elements, ``step`` elements each but the last one of a shard.

    A model of billions of parameters has thousands of spans. So they are computed from a few bytes for each.
    """

    def __init__(self, counts: Sequence[int], step: int) -> None:
        self._counts, self.step = counts, step
        self._first = array("q", accumulate((-(-count // step) for count in counts), initial=0))  # by bucket

    def __len__(self) -> int:
        return self._first[-1]

    def __getitem__(self, number: int) -> Span:
        return self._span(bisect_right(self._first, number) - 1, number)

    def __iter__(self) -> Iterator[Span]:
        for bucket in range(len(self._counts)):
            yield from self.of(bucket)

    def of(self, bucket: int) -> Iterator[Span]:
        """Yield the spans of one shard; none if the bucket does not exist."""
        if 0 <= bucket < len(self._counts):
            for number in range(self._first[bucket], self._first[bucket + 1]):
                yield self._span(bucket, number)

    def _span(self, bucket: int, number: int) -> Span:
        begin = (number - self._first[bucket]) * self.step
        return bucket, begin, min(self.step, self._counts[bucket] - begin)

    def at(self, bucket: int, element: int) -> int:
        """Return the place in this sequence of the span that has ``element`` of the bucket's shard."""
        return self._first[bucket] + element // self.step


class SpanSubset:
    """The ``spans`` that ``chosen`` has a true value for, numbered in their order."""

    def __init__(self, spans: Spans, chosen: Iterable[bool]) -> None:
        self._spans = spans
        self._places = array("i", (place for place, is_in in enumerate(chosen) if is_in))
        self._numbers = array("i", [-1]) * len(spans)
        for number, place in enumerate(self._places):
            self._numbers[place] = number

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Span:
        return self._spans[self._places[number]]

    def number(self, span: Span) -> int:
        """Return the number of a span, or -1 if it is not one of these."""
        return self._numbers[self._spans.at(span[0], span[1])]


SPAN_TILES = 4  # Python's cost per span is small against moving 2 MiB
WINDOWS = 16  # spans in flight


def place(counts: Sequence[int], tiers: Sequence[str], fraction: float) -> tuple[Spans, list[bool]]:
    """Return the spans of shards of ``counts`` elements, and which are on NVMe: evenly spread over the shards of that
    tier."""
    spans = Spans(counts, SPAN_TILES * tiles.TILE_COUNT)
    number, is_swapped = 0, []  # of spans of tier "nvme"; a span is on NVMe if their rounded share grows by one
    for bucket, _, _ in spans:
        could = tiers[bucket] == "nvme"
        is_swapped.append(could and math.floor(number * fraction + 0.5) < math.floor((number + 1) * fraction + 0.5))
        number += could
    return spans, is_swapped


def nbytes_by_tier(spans: Spans, is_swapped: Sequence[bool], tiers: Sequence[str], form: TileForm) -> dict[str, int]:
    """Return the bytes of a SwappedState, without its windows, by the tier that they count as."""
    found: dict[str, int] = {"nvme": 0}
    for (bucket, _, count), on_drive in zip(spans, is_swapped, strict=True):
        tier = "nvme" if on_drive else "device" if tiers[bucket] == "device" else "cpu"
        found[tier] = found.get(tier, 0) + form.nbytes(count)
    return found


def swap_nbytes(counts: Sequence[int], tiers: Sequence[str], fraction: float, form: TileForm) -> int:
    """Return the bytes of a swap file that holds the swapped ones; extents begin at pages."""
    spans, swapped = place(counts, tiers, fraction)
    return sum(whole_pages(form.nbytes(span[2])) for span, on_drive in zip(spans, swapped, strict=True) if on_drive)


class SpansSnapshot:
    """A copy of a swapped state: for reading, on one thread, one span at a time in RAM. copy: of the swap file."""

    def __init__(self, state: SwappedState, copy: SwapCopy) -> None:
        self.form = state.form
        self._state, self._copy = state, copy
        self._in_ram = {span: memory.clone() for span, memory in state._in_ram.items()}
        self._span: Span | None = None  # that is in memory
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Held:
        assert not store
        span, inside = self._state._locate(bucket, part)
        in_ram = self._in_ram.get(span)
        if in_ram is not None:
            return nullcontext(in_ram[inside])
        if self._span != span:
            self._span = None
            self._memory = self._copy.load(_key(span), self._memory)
            self._span = span
        return nullcontext(self._memory[inside])


def _key(span: Span) -> str:
    return f"state.{span[0]}.{span[1]}"


def _keys(swapped: SpanSubset, form: TileForm, number: int) -> Iterable[tuple[str, int]]:
    span = swapped[number]
    return ((_key(span), whole_pages(form.nbytes(span[2]))),)


class SwappedState(ShardState):
    """State on NVMe: ``fraction`` of the buckets of that tier, WINDOWS spans of it in RAM at a time. The other
    spans are always in RAM."""

    def __init__(
        self,
        counts: Sequence[int],
        tiers: Sequence[str],
        dtype: torch.dtype,
        rule: Rule,
        arena: _core.PinnedArena,
        swap: Swap,
        fraction: float = 1.0,
    ) -> None:
        super().__init__(counts, dtype, rule)
        self._place_spans(arena, tiers, fraction)
        keys = partial(_keys, self._swapped, self.form)  # no reference to self: windows are freed with the last one
        self._cache = SpanCache(swap, arena, len(self._swapped), keys, WINDOWS)
        self._depth = max(1, WINDOWS // 2)
        self._then: list[int] = []  # swapped spans that are needed after the next step

    def _place_spans(self, arena: _core.PinnedArena, tiers: Sequence[str], fraction: float) -> None:
        self._spans, is_swapped = place(self.counts, tiers, fraction)
        self._swapped = SpanSubset(self._spans, is_swapped)
        in_ram = [span for span, swapped in zip(self._spans, is_swapped, strict=True) if not swapped]
        sizes = [self.form.nbytes(count) for _, _, count in in_ram]
        memory = tensor_of(arena.allocate(sum(sizes)), torch.uint8) if sum(sizes) else torch.empty(0)
        self._in_ram = dict(zip(in_ram, memory.split(sizes) if in_ram else (), strict=True))
        self.nbytes_by_tier = nbytes_by_tier(self._spans, is_swapped, tiers, self.form)
        # A kernel takes all tiles of a span in one call, if it can.
        self._whole = self.rule.spans_tiles and self.form.dtype != torch.float16

    @property
    def window_nbytes(self) -> int:
        return self._cache.nbytes

    @property
    def waited_s(self) -> float:
        return self._cache.waited_s

    def _locate(self, bucket: int, part: slice) -> tuple[Span, slice]:
        """Return the span of a tile, and the tile's bytes in it."""
        span = self._spans[self._spans.at(bucket, part.start)]
        first = span[1]
        return span, slice(self.form.nbytes(part.start - first), self.form.nbytes(part.stop - first))

    @contextmanager
    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Iterator[torch.Tensor]:
        span, inside = self._locate(bucket, part)
        in_ram = self._in_ram.get(span)
        if in_ram is not None:
            yield in_ram[inside]
            return
        number = self._swapped.number(span)
        if not store:
            yield self._cache.read(number)[inside]
            return
        yield self._cache.edit(number, load or part.stop - part.start < span[2])[inside]
        if inside.stop == self.form.nbytes(span[2]):  # tiles are changed in their order: this was the last one
            self._cache.write(number)
        else:
            self._cache.mark(number)

    def flush(self) -> None:
        self._cache.flush()

    def renew(self) -> None:
        """Make all spans zeros, as at the start, because a failed write leaves nothing to read."""
        self.forget()
        for number in range(len(self._swapped)):
            self._cache.edit(number, load=False).zero_()
            self._cache.write(number)

    def finish_writes(self) -> None:
        self._cache.finish()

    def resident(self) -> list[torch.Tensor]:
        return list(self._in_ram.values())

    def forget(self) -> None:
        self._then = []
        self._cache.forget()

    def snapshot(self, copy: SwapCopy) -> SpansSnapshot:
        return SpansSnapshot(self, copy)

    # --- the update --------------------------------------------------------------------------------------------

    def expect(self, buckets: Sequence[int], reverse: bool = False) -> None:
        self._then = []
        for bucket in buckets:
            order = self._numbered(self._spans.of(bucket))
            self._then.extend(reversed(order) if reverse else order)

    def _numbered(self, spans: Iterable[Span]) -> list[int]:
        """Return the numbers of the swapped ones of ``spans``."""
        return [number for number in map(self._swapped.number, spans) if number >= 0]

    def step(self, shards: Iterator[ShardStep], reverse: bool = False, buckets: Collection[int] | None = None) -> None:
        """See OptimState.step."""
        spans: Spans | list[Span] = (
            self._spans if buckets is None else [span for bucket in sorted(buckets) for span in self._spans.of(bucket)]
        )
        order = self._numbered(spans)
        then, self._then = self._then, []
        sweep = Sweep(self._cache, order[::-1] if reverse else order, self._depth, then)
        shard = next(shards, None)
        for span in reversed(spans) if reverse else spans:
            bucket, begin, count = span
            while shard is not None and shard.bucket != bucket:
                shard = next(shards, None)
            assert shard is not None, f"no shard for bucket {bucket}"
            part = slice(begin, begin + count)
            in_ram = self._in_ram.get(span)
            if in_ram is not None:
                self._step_span(shard, in_ram, part)
                continue
            self._step_span(shard, sweep.take()[: self.form.nbytes(count)], part)
            sweep.write()
        for _ in shards:  # lets the source of shards finish its last one
            pass

    def _step_span(self, shard: ShardStep, state: torch.Tensor, span: slice) -> None:
        if self._whole:
            self._step_tile(shard, state, span)
            return
        for part in cut(span.stop - span.start):
            own = state[self.form.nbytes(part.start) : self.form.nbytes(part.stop)]
            self._step_tile(shard, own, slice(span.start + part.start, span.start + part.stop))

    def close(self) -> None:
        self._then = []
        self._cache.close()
        self._in_ram.clear()
