"""Sources: where stage 3 keeps this rank's parameter shards between gathers: in RAM, in a swap file, or in both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.drain import drain
from zcomm.zero.cache.swap import Swap
from zcomm.zero.layout.flat import ALL, FlatBucket
from zcomm.zero.worker import Waits

WINDOWS = 3  # shards in flight of a swapped step
SPAN_NBYTES = 4 << 20  # most of one key: a copy of the swap file has a key in RAM


class Works:
    """Operations on the keys of one shard."""

    def __init__(self) -> None:
        self._works: list[_core.Work] = []

    def add(self, work: _core.Work) -> None:
        self._works.append(work)

    def wait(self) -> None:
        """Wait for all. Raises: the first error."""
        failed: BaseException | None = None
        while self._works:
            try:
                self._works.pop(0).wait()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed


class ShardSource(ABC):
    """A rank's shards of some buckets, in one place. Thread rule: the main thread."""

    @abstractmethod
    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        """Return memory for the first weights, for ``commit``."""

    @abstractmethod
    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Keep ``weight``, from ``begin`` or ``load``, which the caller has changed."""

    @abstractmethod
    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the shard as it is now; ``commit`` keeps what was changed."""

    def read(self, bucket: FlatBucket, part: slice = ALL) -> torch.Tensor:
        """Return the shard as it is now, or ``part`` of it, not to be changed."""
        return self.load(bucket)[part]

    @abstractmethod
    def close(self) -> None: ...


class HostSource(ShardSource):
    """Shards from which the host gathers units. ``fetch``, ``fetch_part`` and ``put`` run on the gathering thread."""

    @abstractmethod
    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Works | None:
        """Start to copy the shard to ``out``; None when it is there already."""

    @abstractmethod
    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """Copy ``part`` of the shard to ``out``."""

    @abstractmethod
    def put(self, bucket: FlatBucket, weight: torch.Tensor) -> Works | None:
        """Start to keep ``weight``, a shard that was fetched and changed; None when it is kept already."""

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
        pass  # begin() gave the memory itself

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> None:
        out.copy_(self.begin(bucket))

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        out.copy_(self.begin(bucket)[part])

    def put(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self.begin(bucket).copy_(weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self.begin(bucket)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._shards[bucket.index] if bucket.shard_count == bucket.count else None

    def close(self) -> None:
        self._shards.clear()


class SharedSource(RamSource):
    """The shards in one memory of all ranks of the host (decision D4). ``flat``: of all elements of ``every``."""

    def __init__(self, every: Sequence[FlatBucket], flat: torch.Tensor, rank: int) -> None:
        counts = [bucket.count for bucket in every]
        wholes = zip(every, flat.split(counts), strict=True)
        self._whole: dict[int, torch.Tensor] = {bucket.index: whole for bucket, whole in wholes}
        self._shards = {bucket.index: self._whole[bucket.index][bucket.shard(rank)] for bucket in every}

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._whole[bucket.index]

    def close(self) -> None:
        super().close()
        self._whole.clear()


class SwapSource(HostSource):
    """The shards of ``every`` bucket in a swap file, a key for each SPAN_NBYTES or less; ``trained`` are updated.
    Operations on one key run in call order, so a fetch after an update reads what the update wrote."""

    def __init__(
        self,
        every: Sequence[FlatBucket],
        trained: Sequence[FlatBucket],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
        swap: Swap,
    ) -> None:
        self._buckets = trained
        self._number = {bucket.index: number % WINDOWS for number, bucket in enumerate(every)}  # of its window
        self._swap = swap
        largest = max((bucket.shard_count for bucket in every), default=0)
        page = _core.page_nbytes()
        stride = -(-largest * dtype.itemsize // page) * page // dtype.itemsize
        self._lease_nbytes = WINDOWS * stride * dtype.itemsize
        flat = tensor_of(arena.allocate(self._lease_nbytes), dtype)
        # First: dropped, waited for, before their memory is.
        self._writes: list[Works | None] = [None] * WINDOWS
        self._ahead: list[tuple[int, Works] | None] = [None] * WINDOWS  # bucket that is expected, and its reads
        self._windows = [flat[i * stride : i * stride + largest] for i in range(WINDOWS)]
        self._waits = Waits()
        self._holds = [-1] * WINDOWS  # bucket of the shard that, as last written, is in the window
        changing = {bucket.index for bucket in trained}
        for bucket in every:
            for key, span in self.spans(bucket, dtype):
                nbytes = (span.stop - span.start) * dtype.itemsize
                swap.reserve(key, nbytes, fixed=bucket.index not in changing)

    @property
    def waited_s(self) -> float:
        return self._waits.seconds

    @property
    def window_nbytes(self) -> int:
        return self._lease_nbytes

    @staticmethod
    def spans(bucket: FlatBucket, dtype: torch.dtype) -> Iterator[tuple[str, slice]]:
        """Yield the keys of a shard, and its elements that each has. In a weight by rows that is a block at most: an
        embedding uses few of these."""
        step = SPAN_NBYTES // dtype.itemsize
        if bucket.block:
            page = _core.page_nbytes()
            step = min(step, -(-bucket.block * dtype.itemsize // page) * page // dtype.itemsize)
        for begin in range(0, max(bucket.shard_count, 1), step):
            yield f"parameters.{bucket.index}.{begin}", slice(begin, min(begin + step, bucket.shard_count))

    def _window(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the bucket's window, once its last write is on disk."""
        number = self._number[bucket.index]
        write = self._writes[number]
        if write is not None:
            self._waits.wait(write)
            self._writes[number] = None
        self._drop_ahead(number)
        self._holds[number] = -1
        return self._windows[number][: bucket.shard_count]

    def _drop_ahead(self, number: int) -> None:
        """Wait until nothing that was expected is on its way to the window. Its errors are those of a later read."""
        ahead, self._ahead[number] = self._ahead[number], None
        if ahead is not None:
            with suppress(OSError):
                ahead[1].wait()

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._window(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        number = self._number[bucket.index]
        self._writes[number] = self._write(bucket, weight)
        self._holds[number] = bucket.index

    def _write(self, bucket: FlatBucket, weight: torch.Tensor) -> Works:
        writes = Works()
        for key, span in self.spans(bucket, weight.dtype):
            part = weight[span]
            writes.add(self._swap.write(key, part.data_ptr(), part.nbytes))
        return writes

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Works:
        reads = Works()
        for key, span in self.spans(bucket, out.dtype):
            part = out[span]
            reads.add(self._swap.read(key, part.data_ptr(), part.nbytes))
        return reads

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """Keys are read whole: those at the ends by memory of their own."""
        reads, ends = Works(), []
        for key, span in self.spans(bucket, out.dtype):
            low, high = max(span.start, part.start), min(span.stop, part.stop)
            if low >= high:
                continue
            into = out[low - part.start : high - part.start]
            if (low, high) != (span.start, span.stop):
                whole = torch.empty(span.stop - span.start, dtype=out.dtype)
                ends.append((into, whole[low - span.start : high - span.start]))
                into = whole
            reads.add(self._swap.read(key, into.data_ptr(), into.nbytes))
        reads.wait()
        for into, read in ends:
            into.copy_(read)

    def kept(self, bucket: FlatBucket) -> torch.Tensor | None:
        number = self._number[bucket.index]
        return self._windows[number][: bucket.shard_count] if self._holds[number] == bucket.index else None

    def put(self, bucket: FlatBucket, weight: torch.Tensor) -> Works:
        number = self._number[bucket.index]
        self._drop_ahead(number)
        if self._holds[number] == bucket.index:
            self._holds[number] = -1  # the window has the weights of before
        return self._write(bucket, weight)

    def _fetch_window(self, bucket: FlatBucket) -> Works | None:
        """Start to read the shard into its window; None where the last update left it there."""
        held = self._holds[self._number[bucket.index]] == bucket.index
        window = self._window(bucket)
        return None if held else self.fetch(bucket, window)

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        order = ordered(self._buckets, reverse, only)
        ahead: list[Works | None] = []
        for position, bucket in enumerate(order):
            number = self._number[bucket.index]
            work = ahead.pop() if ahead else self._fetch_window(bucket)
            # With gaps in the order the next one may have the same window: it comes later then.
            if position + 1 < len(order) and self._number[order[position + 1].index] != number:
                ahead.append(self._fetch_window(order[position + 1]))
            if work is not None:
                self._waits.wait(work)
            weight = self._windows[number][: bucket.shard_count]
            yield bucket, weight
            self.commit(bucket, weight)

    def expect(self, bucket: FlatBucket, beside: FlatBucket) -> None:
        number = self._number[bucket.index]
        if number != self._number[beside.index] and self._holds[number] != bucket.index:
            self._ahead[number] = bucket.index, self.fetch(bucket, self._window(bucket))

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        number = self._number[bucket.index]
        ahead = self._ahead[number]
        work: Works | None
        if ahead is not None and ahead[0] == bucket.index:
            self._ahead[number], work = None, ahead[1]
        else:
            work = self._fetch_window(bucket)
        if work is not None:
            self._waits.wait(work)
        return self._windows[self._number[bucket.index]][: bucket.shard_count]

    def read(self, bucket: FlatBucket, part: slice = ALL) -> torch.Tensor:
        number = self._number[bucket.index]
        if self._holds[number] != bucket.index:
            self.load(bucket)
            self._holds[number] = bucket.index
        return self._windows[number][: bucket.shard_count][part]

    def renew(self) -> None:
        """Set the trained ones to zeros: after a failed write there is nothing to read."""
        self.forget()
        for bucket in self._buckets:
            self.commit(bucket, self.begin(bucket).zero_())

    def finish_writes(self) -> None:
        for number, write in enumerate(self._writes):
            if write is not None:
                write.wait()
            self._writes[number] = None

    def forget(self) -> None:
        self._writes = [None] * WINDOWS
        self._ahead = [None] * WINDOWS
        drain(self._swap)  # an update that failed may be kept by its error, with the read that it was ahead
        self._holds = [-1] * WINDOWS

    def close(self) -> None:
        self.forget()
        self._windows.clear()


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
    swap: Swap | None,
    share: Callable[[int], torch.Tensor] | None = None,
    rank: int = 0,
) -> dict[int, HostSource]:
    """Build the source of each bucket of ``every``, by number, for its tier.

    tiers: of each bucket of ``every``. swap: needed where one is "nvme". share: gives memory of so many elements
    that all ranks of the host have, for what is in RAM. Collective then. None: each rank has its own shards.
    """
    on_drive = [bucket for bucket, tier in zip(every, tiers, strict=True) if tier == "nvme"]
    in_ram = [bucket for bucket, tier in zip(every, tiers, strict=True) if tier != "nvme"]
    found: dict[int, HostSource] = {}
    if in_ram:
        ram = (
            RamSource(in_ram, dtype, arena)
            if share is None
            else SharedSource(in_ram, share(sum(bucket.count for bucket in in_ram)), rank)
        )
        found |= dict.fromkeys((bucket.index for bucket in in_ram), ram)
    if on_drive:
        assert swap is not None
        numbers = {bucket.index for bucket in on_drive}
        drive = SwapSource(on_drive, [b for b in trained if b.index in numbers], dtype, arena, swap)
        found |= dict.fromkeys(numbers, drive)
    return found
