"""SumRing: fp32 sums of gradients on a drive; the windows of a SpanCache hold a few at a time.

[Note: sums on a drive] A bucket's reduce_scatter adds to this rank's shard in a buffer of the ring. When it has ended,
the shard is written behind backward. A further pass reads it before it adds to it, so each sum has the bits that it has
in RAM. The squares for the norm are taken while the shard is in its buffer, in the last pass that the step expects. A
step reads the shards in its own order, one ahead. A buffer is a window of the cache ([Note: span cache]). Its items
are the sums in the reverse order of the buckets, which is a step's, too. In another launch order a bucket waits for the
reduction in its buffer (``holder``).
While ``consumes``, updates use the sums up.
An I/O error in backward is kept: collectives continue, and all ranks raise it in ``step()``, before anything has
changed.
Memory: RING buffers of the largest shard, fp32. On the drive: 4 bytes per element of the shards.
Thread rule: as GradientReducer; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from zcomm import _core
from zcomm.zero.cache.span_cache import SpanCache, whole_pages, windows_nbytes
from zcomm.zero.cache.swap import SCRATCH, Swap
from zcomm.zero.gradients.norm import GradientNorm, Squares
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.update_hooks import UpdateHooks

RING = 3  # shards in RAM: one is reduced, one is written, one is read


def ring_nbytes(shard_counts: Sequence[int]) -> int:
    """Return the bytes of the ring for shards of these elements."""
    return windows_nbytes(4 * max(shard_counts, default=0), len(shard_counts), RING)


def drive_nbytes(shard_counts: Sequence[int]) -> int:
    """Return the bytes of the sums in a swap file; extents begin at pages."""
    return sum(whole_pages(4 * count) for count in shard_counts)


def _keys(order: Sequence[FlatBucket], item: int) -> Iterable[tuple[str, int]]:
    return ((f"{SCRATCH}{order[item].index}", 4 * order[item].shard_count),)


class SumRing:
    """The sums of ``order``, the buckets from the last to the first.

    views: the place of each bucket's shard in its buffer, by bucket, fp32 [shard_count]. number: of the buffer.
    wants_squares: whether steps compute the norm before they update. knows_squares: ``add_squares`` reads no sum.
    """

    def __init__(self, order: Sequence[FlatBucket], arena: _core.PinnedArena, swap: Swap, updates: UpdateHooks) -> None:
        self._updates = updates
        self._order = list(order)
        self._item = {bucket.index: item for item, bucket in enumerate(order)}
        self._cache = cache = SpanCache(swap, arena, len(order), partial(_keys, self._order), RING)
        self.number = {bucket: cache.window(item) for bucket, item in self._item.items()}
        self.views = {bucket: cache.memory(item).view(torch.float32) for bucket, item in self._item.items()}
        self._opened = -1  # buffer that a caller may still use
        self._taken = [0] * min(RING, len(order))  # pass of the reduction: one of the last pass may end in this one
        self._error: BaseException | None = None
        self.nbytes = cache.nbytes
        self.drive_nbytes = sum(4 * bucket.shard_count for bucket in order)
        self.held = self._forgotten = False  # an update still wants the sums; they are forgotten after it
        self.wants_squares = True
        self.knows_squares = False
        self._squares = Squares()
        self._summing, self._pass = False, 0
        self.consumes = False  # sums are not stored: updates consume them (``UpdateHooks.on_sum``)
        self.gone = ""  # why there are no sums

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the drive."""
        return self._cache.waited_s

    # --- one pass ---------------------------------------------------------------------------------------------

    def begin_pass(self, last: bool) -> None:
        """Begin a backward pass. last: no other one is expected to follow before the step."""
        self.knows_squares, self._summing = False, last and self.wants_squares
        self._pass += 1
        self._squares.clear()

    def end_pass(self) -> None:
        """End it: all its reductions have begun."""
        self.knows_squares = self._summing

    def holder(self, bucket: int) -> int:
        """Return the bucket that has its sum in the buffer of ``bucket``, or -1."""
        item = self._cache.held(self.number[bucket])
        return item if item < 0 else self._order[item].index

    def take(self, bucket: int, load: bool) -> None:
        """Prepare the buffer of ``bucket`` for a reduction. load: with its sum. Keeps errors of the drive."""
        self._opened, item = -1, self._item[bucket]
        if self._error is None:
            with self._keeping():
                self._cache.edit(item, load)
        if self._error is not None:
            self._cache.discard(item)
        self._cache.mark(item)
        self._taken[self.number[bucket]] = self._pass

    def store(self, bucket: int) -> None:
        """Add the squares of a reduced sum, and start to write it. Keeps errors of the drive."""
        if not self._cache.is_dirty(self._item[bucket]):
            return
        if self._summing and self._taken[self.number[bucket]] == self._pass:
            self._squares.add(self._order[self._item[bucket]], self.views[bucket])
        self._write(bucket)

    # --- between passes ---------------------------------------------------------------------------------------

    def open(self, bucket: int, change: bool = False) -> torch.Tensor:
        """Return the sum of ``bucket``, valid until another one is opened. change: it may be changed. Raises: OSError
        if sums are lost."""
        if self.gone or self.consumes:
            raise RuntimeError(f"the sum of a gradient: {self.gone or 'backward uses it up'}")
        self._opened, item = self.number[bucket], self._item[bucket]
        self.check()
        with self._keeping():
            if change:
                self._cache.edit(item)
                self._cache.mark(item)
            else:
                self._cache.read(item)
        self.check()
        if change:
            self.knows_squares = self._summing = False
        return self.views[bucket]

    def expect(self, bucket: int) -> None:
        """Start to read the sum of ``bucket``, the next one to be used.

        Does nothing if that has to wait for its buffer, or if the buffer has the sum that was opened last.
        """
        item = self._item.get(bucket)
        if item is not None and self.number[bucket] != self._opened and self._error is None:
            with self._keeping():
                self._cache.prefetch_if_free(item)

    def finish(self) -> None:
        """Wait until all sums are on the drive. Raises: OSError if one is lost."""
        for bucket in self.number:
            if self._cache.is_dirty(self._item[bucket]):
                self._write(bucket)
        with self._keeping():
            self._cache.settle()
        self.check()

    def check(self) -> None:
        """Raise OSError if sums of this step are lost."""
        if self._error is not None:
            error = self._error
            code = error.errno if isinstance(error, OSError) else None
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            words = f"the gradients of this step are lost ({what})"
            if not self.consumes and not self.gone:
                words += ": call zero_grad() and run backward again"
            raise OSError(code, words) from error

    def add_squares(self, norm: GradientNorm, buckets: Sequence[FlatBucket]) -> None:
        """Add the squares of the sums of ``buckets``, all that there are, to ``norm``."""
        if self.knows_squares:
            norm.squares.add_words(self._squares.end())
            return
        for position, bucket in enumerate(buckets):
            sum_ = self.open(bucket.index)
            if position + 1 < len(buckets):
                self.expect(buckets[position + 1].index)
            norm.squares.add(bucket, sum_)
        self._opened = -1

    def forget(self) -> None:
        """Make all sums zero, also lost ones, without moving bytes. Held sums become zero after ``release``."""
        self._forgotten, self.gone = self.held, ""
        if self.held:
            return
        self._cache.erase(lost=self._error is not None)
        self._error = None
        self.knows_squares = self._summing = False

    def release(self) -> None:
        """End ``held``."""
        self.held = False
        if self._forgotten:
            self.forget()

    # --- one buffer -------------------------------------------------------------------------------------------

    def _write(self, bucket: int) -> None:
        item = self._item[bucket]
        if self.consumes:
            self._cache.lend(item, self._updates.on_sum(bucket, self.views[bucket]))
        elif self._error is None:
            with self._keeping():
                self._cache.write(item)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Keep an error of the block."""
        try:
            yield
        except Exception as error:  # an interrupt leaves the operation pending
            self._keep(error)

    def _keep(self, error: BaseException) -> None:
        self._error = self._error or error

    def lose(self, error: BaseException) -> None:
        """Count all sums as lost, until ``forget``: ``error`` has ended an operation half way."""
        self._keep(error)
        self.knows_squares = self._summing = False

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Count all sums as lost if an error or an interrupt ends the block."""
        try:
            yield
        except BaseException as error:
            self.lose(error)
            raise

    def close(self) -> None:
        """Wait for pending operations, and free the ring."""
        self._cache.close()
        self.views.clear()
