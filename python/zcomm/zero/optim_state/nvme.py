"""Optimizer state on NVMe: spans of tiles READ -> step -> WRITE through a ring of windows, reads running ahead.

[Note: swapped step] A tile is TILE_COUNT elements with all of their state (layout/tiles.py). A span is SPAN_TILES tiles
of a shard: one key of the swap file, one call of the rule. A window is pinned memory for one span. Keys are of whole
pages ([Note: whole pages]): what is behind a span in its last page is not looked at.
Swapped span i uses window i % WINDOWS. Half of the windows read ahead, the others write back, so that 16 MiB of each
are on their way (fp32 Adam). The last writes go on while the next forward runs; the window's next read waits for them.
Updates alternate their direction. The next one begins with the spans that the last one left in the windows: these
need not be read. A fraction below 1 keeps evenly spread spans in RAM: the step works on them while the next ones
are read. Outside of a step a span is written after its last tile, or when its window is wanted for another one.
Source: ZeRO-Infinity (arXiv:2104.07857) section 5.1; decision D8.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.drain import drain
from zcomm.zero.cache.swap import AnyCopy
from zcomm.zero.layout import tiles
from zcomm.zero.layout.tiles import TileForm, cut
from zcomm.zero.optim_state.ram import Held, ShardState, ShardStep
from zcomm.zero.optim_state.spans import SomeSpans, Span, Spans
from zcomm.zero.rules.rule import Rule
from zcomm.zero.worker import Waits

SPAN_TILES = 4  # what Python costs per span is little beside moving 2 MiB
WINDOWS = 16  # spans in flight


def place(counts: Sequence[int], tiers: Sequence[str], fraction: float) -> tuple[Spans, list[bool]]:
    """Return the spans of shards of ``counts`` elements, and which are on NVMe: evenly spread over the shards of that
    tier."""
    spans = Spans(counts, SPAN_TILES * tiles.TILE_COUNT)
    number, is_swapped = 0, []  # of those that could be there; its share, rounded, grows by one: it is on NVMe
    for bucket, _, _ in spans:
        could = tiers[bucket] == "nvme"
        is_swapped.append(could and math.floor(number * fraction + 0.5) < math.floor((number + 1) * fraction + 0.5))
        number += could
    return spans, is_swapped


def swap_nbytes(counts: Sequence[int], tiers: Sequence[str], fraction: float, form: TileForm) -> int:
    """Return the bytes of a swap file that holds the swapped ones; extents begin at pages."""
    spans, swapped = place(counts, tiers, fraction)
    return sum(_pages(form.nbytes(span[2])) for span, on_drive in zip(spans, swapped, strict=True) if on_drive)


def _pages(nbytes: int) -> int:
    page = _core.page_nbytes()
    return -(-nbytes // page) * page


class SpansSnapshot:
    """A swapped state as it was: for reading, on one thread, one span at a time in RAM. copy: of the swap file."""

    def __init__(self, state: SwappedState, copy: AnyCopy) -> None:
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
            self._memory = self._copy.load(self._state._key(self._state._swapped.number(span)), self._memory)
            self._span = span
        return nullcontext(self._memory[inside])


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
        swap: _core.SwapFile,
        fraction: float = 1.0,
    ) -> None:
        super().__init__(counts, dtype, rule)
        self._swap = swap
        self._place_spans(arena, tiers, fraction)
        largest = max((count for _, _, count in self._swapped), default=0)
        self._span_nbytes = _pages(self.form.nbytes(largest))
        windows = min(WINDOWS, len(self._swapped))
        memory = tensor_of(arena.allocate(windows * self._span_nbytes), torch.uint8) if windows else torch.empty(0)
        # Before the windows: attributes are dropped in this order, and a dropped Work is waited for.
        self._writes: list[_core.Work | None] = [None] * windows
        self._windows = list(memory.split(self._span_nbytes)) if windows else []
        self._holds = [-1] * windows  # swapped span that has its state in the window
        self._changed = [False] * windows  # and it is not what is on the drive
        self._waits = Waits()
        self._ahead: dict[int, _core.Work] = {}  # by window: reads that no step has waited for yet
        self._then: list[int] = []  # swapped spans that are wanted after the next step
        self._on_drive = bytearray(len(self._swapped))
        for number, (_, _, count) in enumerate(self._swapped):
            swap.reserve(self._key(number), _pages(self.form.nbytes(count)))

    def _place_spans(self, arena: _core.PinnedArena, tiers: Sequence[str], fraction: float) -> None:
        self._spans, is_swapped = place(self.counts, tiers, fraction)
        self._swapped = SomeSpans(self._spans, is_swapped)
        in_ram = [span for span, swapped in zip(self._spans, is_swapped, strict=True) if not swapped]
        sizes = [self.form.nbytes(count) for _, _, count in in_ram]
        memory = tensor_of(arena.allocate(sum(sizes)), torch.uint8) if sum(sizes) else torch.empty(0)
        self._in_ram = dict(zip(in_ram, memory.split(sizes) if in_ram else (), strict=True))
        self.nbytes_by_tier = {"nvme": sum(self.form.nbytes(count) for _, _, count in self._swapped)}
        for (bucket, _, _), size in zip(in_ram, sizes, strict=True):
            tier = "device" if tiers[bucket] == "device" else "cpu"
            self.nbytes_by_tier[tier] = self.nbytes_by_tier.get(tier, 0) + size
        # A kernel takes all tiles of a span in one call, where it can.
        self._whole = self.rule.spans_tiles and self.form.dtype != torch.float16

    @property
    def window_nbytes(self) -> int:
        return len(self._windows) * self._span_nbytes

    @property
    def waited_s(self) -> float:
        return self._waits.seconds

    # --- one span ---------------------------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        bucket, begin, _ = self._swapped[number]
        return f"state.{bucket}.{begin}"

    def _window_index(self, number: int) -> int:
        return number % len(self._windows)

    def _window(self, number: int) -> torch.Tensor:
        window: torch.Tensor = self._windows[self._window_index(number)]
        return window[: self.form.nbytes(self._swapped[number][2])]

    def _pages_of(self, number: int) -> torch.Tensor:
        """Return the span's window up to the end of a page, which is what its key holds."""
        window: torch.Tensor = self._windows[self._window_index(number)]
        return window[: _pages(self.form.nbytes(self._swapped[number][2]))]

    def _wait_written(self, window: int) -> None:
        """Wait until no write of the window is pending, so that it may be changed."""
        write, self._writes[window] = self._writes[window], None
        self._wait(write)

    def _take(self, number: int) -> None:
        """Give the span a window of its own, with whatever is in it."""
        index = self._window_index(number)
        self._wait(self._ahead.pop(index, None))
        if self._holds[index] == number:
            return
        if self._changed[index]:
            self._write(self._holds[index])
        self._wait_written(index)
        self._holds[index] = number

    def _read(self, number: int) -> _core.Work | None:
        """Start to read a swapped span once its window's last write is on disk; None: the window still holds it."""
        if self._holds[self._window_index(number)] == number:
            return self._ahead.pop(self._window_index(number), None)
        self._take(number)
        window = self._pages_of(number)
        return self._swap.read(self._key(number), window.data_ptr(), window.nbytes)

    def _write(self, number: int) -> None:
        index, window = self._window_index(number), self._pages_of(number)
        self._writes[index] = self._swap.write(self._key(number), window.data_ptr(), window.nbytes)
        self._changed[index] = False
        self._on_drive[number] = 1

    def _locate(self, bucket: int, part: slice) -> tuple[Span, slice]:
        """Return the span that a tile is in, and the tile's bytes there."""
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
        if self._on_drive[number] and (load or part.stop - part.start < span[2]):
            self._wait(self._read(number))
        else:
            self._take(number)
        if store:
            self._wait_written(self._window_index(number))
        yield self._window(number)[inside]
        if store:
            self._changed[self._window_index(number)] = True
            if inside.stop == self.form.nbytes(span[2]):  # tiles are changed in their order: this was the last one
                self._write(number)

    def flush(self) -> None:
        for index, changed in enumerate(self._changed):
            if changed:
                self._write(self._holds[index])

    def renew(self) -> None:
        """Spans are zeros, as at the start: after a failed write there is nothing to read."""
        self.forget()
        for number in range(len(self._swapped)):
            self._take(number)
            self._window(number).zero_()
            self._write(number)

    def finish_writes(self) -> None:
        self.flush()
        for index in range(len(self._writes)):
            self._wait_written(index)

    def resident(self) -> list[torch.Tensor]:
        return list(self._in_ram.values())

    def forget(self) -> None:
        self._writes = [None] * len(self._windows)
        self._ahead.clear()
        self._then = []
        drain(self._swap)  # the frames of a step that failed may keep its reads, which were not waited for
        self._holds = [-1] * len(self._windows)
        self._changed = [False] * len(self._windows)

    def snapshot(self, copy: AnyCopy | None) -> SpansSnapshot:
        assert copy is not None
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
        spans: Sequence[Span] = (
            self._spans if buckets is None else [span for bucket in sorted(buckets) for span in self._spans.of(bucket)]
        )
        order = self._numbered(spans)
        numbers = deque(reversed(order) if reverse else order)  # swapped spans still to be read
        left = deque(numbers)  # to be stepped
        then, self._then = deque(self._then), []
        reads: deque[_core.Work | None] = deque()
        self._read_some(numbers, reads, left)
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
            self._wait(reads.popleft())
            number = self._swapped.number(span)
            self._wait_written(self._window_index(number))
            self._step_span(shard, self._window(number), part)
            self._write(number)
            left.popleft()
            if numbers:
                self._read_some(numbers, reads, left)
            elif then:
                self._read_ahead(then, left)
        for _ in shards:  # lets the source of shards finish its last one
            pass

    def _read_some(self, numbers: deque[int], reads: deque[_core.Work | None], left: Collection[int]) -> None:
        """Start to read the next of ``numbers``. Those of some buckets have gaps: a span with the same window as one
        that is read, and ``left`` to be stepped, comes later."""
        while numbers and len(reads) < WINDOWS // 2:
            index = self._window_index(numbers[0])
            if any(self._window_index(number) == index for number in islice(left, len(reads))):
                return
            reads.append(self._read(numbers.popleft()))

    def _read_ahead(self, then: deque[int], left: Collection[int]) -> None:
        """Start to read a span that a later step wants, unless one that is ``left`` in this one has its window."""
        index = self._window_index(then[0])
        if len(self._ahead) >= WINDOWS // 2 or any(self._window_index(number) == index for number in left):
            then.clear()
            return
        work = self._read(then.popleft())
        if work is not None:
            self._ahead[index] = work

    def _step_span(self, shard: ShardStep, state: torch.Tensor, span: slice) -> None:
        if self._whole:
            self._step_tile(shard, state, span)
            return
        for part in cut(span.stop - span.start):
            own = state[self.form.nbytes(part.start) : self.form.nbytes(part.stop)]
            self._step_tile(shard, own, slice(span.start + part.start, span.start + part.stop))

    def _wait(self, work: _core.Work | None) -> None:
        """Wait for a read or write. Where that fails, the windows are known to hold nothing but unwritten changes."""
        if work is not None:
            try:
                self._waits.wait(work)
            except BaseException:
                self._holds = [
                    number if changed else -1 for number, changed in zip(self._holds, self._changed, strict=True)
                ]
                raise

    def close(self) -> None:
        self.forget()
        self._windows.clear()
        self._in_ram.clear()
