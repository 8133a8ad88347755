"""Sources: where stage 3 keeps this rank's parameter shards between gathers: in RAM, in a swap file, or in both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.layout.flat import ALL, FlatBucket
from zcomm.zero.optim_state.swap_file import Swap, drain
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
    """A rank's shards of buckets. ``fetch`` runs on the gathering thread, the rest on the main thread.

    on_drive: whether shards come from a drive.
    """

    on_drive = False

    @abstractmethod
    def begin(self, bucket: FlatBucket) -> torch.Tensor: ...
    @abstractmethod
    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None: ...
    @abstractmethod
    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Works | None:
        """Start to copy the shard to ``out``; None when it is there already."""

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        """Copy ``part`` of the shard to ``out``. On the gathering thread."""
        raise NotImplementedError

    def kept(self, bucket: FlatBucket) -> torch.Tensor | None:
        """Return the shard as ``commit`` has left it, where it is in RAM. On the gathering thread, while no other one
        changes shards."""
        return None

    def put(self, bucket: FlatBucket, weight: torch.Tensor) -> Works | None:
        """Start to keep ``weight``, a shard that was fetched and changed; None when it is kept already. On the
        gathering thread."""
        raise NotImplementedError

    @abstractmethod
    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        """Yield the trained ones, or those of the buckets ``only``."""

    @abstractmethod
    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the shard as it is now; ``commit`` keeps what was changed."""

    def expect(self, bucket: FlatBucket, beside: FlatBucket) -> None:  # noqa: B027
        """Start to read the shard of ``bucket``, which ``load`` wants next, while that of ``beside`` is changed."""

    def read(self, bucket: FlatBucket, part: slice = ALL) -> torch.Tensor:
        """Return the shard as it is now, or ``part`` of it, not to be changed."""
        return self.load(bucket)[part]

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        """Return the bucket with all ranks' shards, as it is in this host's memory; None where it is not there."""
        return None

    # Hooks for a source on devices; on the host nothing is on its way.

    def stays(self, bucket: FlatBucket) -> bool:
        """Return True if the shard stays on the device."""
        return False

    def there(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the shard on the device."""
        raise NotImplementedError

    def used(self) -> None:  # noqa: B027
        """Let an update come after what torch's stream has been given so far, which uses the old weights."""

    def arrive(self) -> None:  # noqa: B027
        """Let what torch's stream is given next see the new weights."""

    @property
    def followed_nbytes(self) -> int:
        """Bytes of the host's copies of what stays."""
        return 0

    def renew(self) -> None:  # noqa: B027
        """After a failure, before all trained ones are loaded: nothing is in flight, and no shard is lost to it."""

    # Of a transaction (transaction.py); a source on devices has none.

    def finish_writes(self) -> None:  # noqa: B027
        """Wait until all shards are on the drive. Raises: OSError."""

    def forget(self) -> None:  # noqa: B027
        """Let nothing be on its way, and no window hold anything; drops errors."""

    def resident(self) -> list[torch.Tensor]:
        """Return the trained shards that are in RAM alone."""
        return []

    @property
    def waited_s(self) -> float:
        """Seconds that threads which train have waited for the drive."""
        return 0.0

    @property
    def window_nbytes(self) -> int:
        return 0

    @abstractmethod
    def close(self) -> None: ...


class RamSource(ShardSource):
    """The shards of ``every`` bucket in the pinned arena; ``trained`` are updated."""

    def __init__(
        self,
        every: Sequence[FlatBucket],
        trained: Sequence[FlatBucket],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
    ) -> None:
        self._buckets = trained
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

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket in _ordered(self._buckets, reverse, only):
            yield bucket, self.begin(bucket)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self.begin(bucket)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._shards[bucket.index] if bucket.shard_count == bucket.count else None

    def resident(self) -> list[torch.Tensor]:
        return [self._shards[bucket.index] for bucket in self._buckets]

    def close(self) -> None:
        self._shards.clear()


class SharedSource(RamSource):
    """The shards in one memory of all ranks of the host (decision D4). ``flat``: of all elements of ``every``."""

    def __init__(
        self, every: Sequence[FlatBucket], trained: Sequence[FlatBucket], flat: torch.Tensor, rank: int
    ) -> None:
        self._buckets = trained
        counts = [bucket.count for bucket in every]
        wholes = zip(every, flat.split(counts), strict=True)
        self._whole: dict[int, torch.Tensor] = {bucket.index: whole for bucket, whole in wholes}
        self._shards = {bucket.index: self._whole[bucket.index][bucket.shard(rank)] for bucket in every}

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._whole[bucket.index]

    def close(self) -> None:
        super().close()
        self._whole.clear()


class SwapSource(ShardSource):
    """The shards of ``every`` bucket in a swap file, a key for each SPAN_NBYTES or less; ``trained`` are updated.
    Operations on one key run in call order, so a fetch after an update reads what the update wrote."""

    on_drive = True

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
        order = _ordered(self._buckets, reverse, only)
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


class MixedSource(ShardSource):
    """Two sources: ``swapped`` has the buckets that are in ``swap``. ``trained`` are updated."""

    on_drive = True

    def __init__(self, ram: RamSource, swap: SwapSource, swapped: set[int], trained: Sequence[FlatBucket]) -> None:
        self._ram, self._swap, self._swapped, self._buckets = ram, swap, swapped, trained

    def _of(self, bucket: FlatBucket) -> ShardSource:
        return self._swap if bucket.index in self._swapped else self._ram

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._of(bucket).begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._of(bucket).commit(bucket, weight)

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> Works | None:
        return self._of(bucket).fetch(bucket, out)

    def fetch_part(self, bucket: FlatBucket, part: slice, out: torch.Tensor) -> None:
        self._of(bucket).fetch_part(bucket, part, out)

    def kept(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._of(bucket).kept(bucket)

    def put(self, bucket: FlatBucket, weight: torch.Tensor) -> Works | None:
        return self._of(bucket).put(bucket, weight)

    def iter_shards(
        self, reverse: bool, only: Collection[int] | None = None
    ) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        swapped = self._swap.iter_shards(reverse, only)
        for bucket in _ordered(self._buckets, reverse, only):
            yield next(swapped) if bucket.index in self._swapped else (bucket, self._ram.begin(bucket))
        for _ in swapped:  # keeps the last one
            pass

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self._of(bucket).load(bucket)

    def expect(self, bucket: FlatBucket, beside: FlatBucket) -> None:
        if {bucket.index, beside.index} <= self._swapped:
            self._swap.expect(bucket, beside)

    def read(self, bucket: FlatBucket, part: slice = ALL) -> torch.Tensor:
        return self._of(bucket).read(bucket, part)

    def whole(self, bucket: FlatBucket) -> torch.Tensor | None:
        return self._of(bucket).whole(bucket)

    def renew(self) -> None:
        self._swap.renew()

    def finish_writes(self) -> None:
        self._swap.finish_writes()

    def forget(self) -> None:
        self._swap.forget()

    def resident(self) -> list[torch.Tensor]:
        return self._ram.resident()

    @property
    def waited_s(self) -> float:
        return self._swap.waited_s

    @property
    def window_nbytes(self) -> int:
        return self._swap.window_nbytes

    def close(self) -> None:
        self._ram.close()
        self._swap.close()


def _ordered(buckets: Sequence[FlatBucket], reverse: bool, only: Collection[int] | None) -> list[FlatBucket]:
    chosen = [bucket for bucket in buckets if only is None or bucket.index in only]
    return chosen[::-1] if reverse else chosen


def make_source(
    every: Sequence[FlatBucket],
    trained: Sequence[FlatBucket],
    tiers: Sequence[str],
    dtype: torch.dtype,
    arena: _core.PinnedArena,
    swap: Swap | None,
    share: Callable[[int], torch.Tensor] | None = None,
    rank: int = 0,
) -> ShardSource:
    """Build the source for the tiers of the buckets.

    tiers: of each bucket of ``every``. swap: needed where one is "nvme". share: gives memory of so many elements
    that all ranks of the host have, for what is in RAM. Collective then. None: each rank has its own shards.
    """
    swapped = {bucket.index for bucket, tier in zip(every, tiers, strict=True) if tier == "nvme"}

    def cut(inside: bool) -> tuple[list[FlatBucket], list[FlatBucket]]:
        parts = ([b for b in buckets if (b.index in swapped) == inside] for buckets in (every, trained))
        return next(parts), next(parts)

    def in_ram() -> RamSource:
        inside = cut(False)
        if share is None:
            return RamSource(*inside, dtype, arena)
        return SharedSource(*inside, share(sum(bucket.count for bucket in inside[0])), rank)

    if not swapped:
        return in_ram()
    assert swap is not None
    disk = SwapSource(*cut(True), dtype, arena, swap)
    if len(swapped) == len(every):
        return disk
    return MixedSource(in_ram(), disk, swapped, trained)
