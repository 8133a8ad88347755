"""Sources: this rank's parameter shards of stage 3 between gathers, in RAM, in a swap file, or in both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.span_cache import SpanCache, Sweep, WorkGroup
from zcomm.zero.cache.swap import AnySwap, Swap
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket

WINDOWS = 3  # shards in flight of a swapped step
_DEPTH = 2  # of these, the ones that are read or changed; the others are written
SPAN_NBYTES = 4 << 20  # most of one key: a copy of the swap file has a key in RAM


class ShardSource(ABC):
    """A rank's shards of some buckets, in one place. Thread rule: the main thread."""

    on_drive = False

    @abstractmethod
    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        """Return memory for the first weights, for ``commit``."""

    @abstractmethod
    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Keep ``weight``, from ``begin`` or ``load``, which the caller has changed."""

    @abstractmethod
    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the present shard; ``commit`` keeps changes."""

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        """Return the present shard, or ``part`` of it, not to be changed."""
        return self.load(bucket)[part]

    @abstractmethod
    def close(self) -> None: ...


class HostSource(ShardSource):
    """Shards from which the host gathers units. ``fetch`` and ``fetch_part`` run on the gathering thread."""

    @abstractmethod
    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> WorkGroup | None:
        """Start to copy the shard to ``out``; None: ``out`` has it already."""

    @abstractmethod
    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """Copy ``part`` of the shard to ``out``."""

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        """See Sources.whole."""
        return None


class RamSource(HostSource):
    """The shards of ``every`` bucket in the pinned arena."""

    def __init__(
        self,
        every: Sequence[FlatBucket],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
    ) -> None:
        sizes = [bucket.shard_count for bucket in every]
        flat = tensor_of(arena.allocate(sum(sizes) * dtype.itemsize), dtype, sum(sizes))
        self._shards: dict[int, torch.Tensor] = dict(
            zip((bucket.index for bucket in every), flat.split(sizes), strict=True)
        )

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._shards[bucket.index]

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        pass  # begin() returned the memory itself

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> None:
        out.copy_(self.begin(bucket))

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        out.copy_(self.begin(bucket)[part])

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self.begin(bucket)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._shards[bucket.index] if bucket.shard_count == bucket.count else None

    def close(self) -> None:
        self._shards.clear()


class SharedSource(RamSource):
    """The shards in one memory of all ranks of the host (decision D4). ``flat``: of all elements of ``every``."""

    def __init__(self, every: Sequence[FlatBucket], flat: torch.Tensor) -> None:
        counts = [bucket.count for bucket in every]
        wholes = zip(every, flat.split(counts), strict=True)
        self._whole: dict[int, torch.Tensor] = {bucket.index: whole for bucket, whole in wholes}
        self._shards = {bucket.index: self._whole[bucket.index][bucket.part] for bucket in every}

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._whole[bucket.index]

    def close(self) -> None:
        super().close()
        self._whole.clear()


class SwapSource(HostSource):
    """The shards of ``every`` bucket in a swap file, a key for each SPAN_NBYTES or less; ``trained`` are updated.
    Operations on one key run in call order, so a fetch after an update reads the updated weights."""

    on_drive = True

    def __init__(
        self,
        every: Sequence[FlatBucket],
        trained: Sequence[FlatBucket],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
        swap: Swap,
    ) -> None:
        self._buckets, self._dtype = trained, dtype
        self._item = {bucket.index: item for item, bucket in enumerate(every)}
        changing = {bucket.index for bucket in trained}
        fixed = {item for item, bucket in enumerate(every) if bucket.index not in changing}
        self._cache = SpanCache(swap, arena, len(every), partial(_keys, every, dtype), WINDOWS, fixed)

    @property
    def waited_s(self) -> float:
        return self._cache.waited_s

    @property
    def window_nbytes(self) -> int:
        return self._cache.nbytes

    @staticmethod
    def spans(bucket: FlatBucket, dtype: torch.dtype) -> Iterator[tuple[str, slice]]:
        """Yield the keys of a shard, and the elements of each. In a weight by rows no key has elements of two blocks,
        if blocks are whole pages, because uses read blocks."""
        step, page = SPAN_NBYTES // dtype.itemsize, _core.page_nbytes() // dtype.itemsize
        block, first = bucket.block, bucket.part.start
        if block and (block % page or first % page):
            step, block = min(step, -(-block // page) * page), 0
        begin = end = 0
        while begin == 0 or end < bucket.shard_count:
            begin, rest = end, block - (first + end) % block if block else step
            end = min(begin + min(step, rest), bucket.shard_count)
            yield f"parameters.{bucket.index}.{begin}", slice(begin, end)
            if not end:
                return

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._cache.edit(self._item[bucket.index], load=False).view(self._dtype)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._cache.write(self._item[bucket.index])

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> WorkGroup:
        return self._cache.read_into(self._item[bucket.index], out)

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        self._cache.read_part_into(
            self._item[bucket.index], part.start * self._dtype.itemsize, out.view(-1).view(torch.uint8)
        )

    def kept(self, bucket: FlatBucket) -> torch.Tensor | None:
        memory = self._cache.peek(self._item[bucket.index])
        return None if memory is None else memory.view(self._dtype)

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        order = ordered(self._buckets, reverse, only)
        sweep = Sweep(self._cache, [self._item[bucket.index] for bucket in order], _DEPTH)
        for bucket in order:
            yield bucket, sweep.take().view(self._dtype)
            sweep.write()

    def expect(self, bucket: FlatBucket, beside: FlatBucket) -> None:
        item = self._item[bucket.index]
        if self._cache.window(item) != self._cache.window(self._item[beside.index]):
            self._cache.prefetch(item)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._cache.edit(self._item[bucket.index]).view(self._dtype)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self._cache.read(self._item[bucket.index]).view(self._dtype)[part]

    def renew(self) -> None:
        """Set the trained shards to zeros, because a failed write leaves nothing to read."""
        self.forget()
        for bucket in self._buckets:
            self.commit(bucket, self.begin(bucket).zero_())

    def finish_writes(self) -> None:
        self._cache.finish()

    def forget(self) -> None:
        self._cache.forget()

    def close(self) -> None:
        self._cache.close()


def _keys(every: Sequence[FlatBucket], dtype: torch.dtype, item: int) -> Iterator[tuple[str, int]]:
    for key, span in SwapSource.spans(every[item], dtype):
        yield key, (span.stop - span.start) * dtype.itemsize


def ordered(buckets: Sequence[FlatBucket], reverse: bool, only: Collection[int] | None) -> list[FlatBucket]:
    """Return ``buckets``, or those with numbers in ``only``, in the order of an update."""
    chosen = [bucket for bucket in buckets if only is None or bucket.index in only]
    return chosen[::-1] if reverse else chosen


def host_sources(
    every: Sequence[FlatBucket],
    trained: Sequence[FlatBucket],
    tiers: Sequence[str],
    dtype: torch.dtype,
    arena: _core.PinnedArena,
    swap: AnySwap,
    share: Callable[[int], torch.Tensor] | None = None,
) -> dict[int, HostSource]:
    """Build the source of each bucket of ``every``, by number, for its tier.

    tiers: of each bucket of ``every``. swap: a file if one is "nvme". share: allocates memory of so many elements that
    all ranks of the host have, for shards in RAM. Collective then. None: each rank has its own shards.
    """
    on_drive = [bucket for bucket, tier in zip(every, tiers, strict=True) if tier == "nvme"]
    in_ram = [bucket for bucket, tier in zip(every, tiers, strict=True) if tier != "nvme"]
    found: dict[int, HostSource] = {}
    if in_ram:
        ram = (
            RamSource(in_ram, dtype, arena)
            if share is None
            else SharedSource(in_ram, share(sum(bucket.count for bucket in in_ram)))
        )
        found |= dict.fromkeys((bucket.index for bucket in in_ram), ram)
    if on_drive:
        assert isinstance(swap, Swap)
        numbers = {bucket.index for bucket in on_drive}
        drive = SwapSource(on_drive, [b for b in trained if b.index in numbers], dtype, arena, swap)
        found |= dict.fromkeys(numbers, drive)
    return found
