"""SumRing: fp32 sums of gradients on a drive, of which a ring of buffers holds a few at a time.

[Note: sums on a drive] A bucket's reduce_scatter adds to this rank's shard in a buffer of the ring. When it has ended,
the shard is written behind backward. A further pass reads it before it adds to it, so each sum has the bits that it has
in RAM. The squares for the norm are taken while the shard is in its buffer, in the last pass that the step expects. A
step reads the shards in its own order, one ahead. Buffers are dealt in the reverse order of the buckets, which is a
step's, too. In another launch order a bucket waits for the reduction in its buffer (``holder``).
Where ``consume`` is set, it takes the sums of all buckets but those in ``stays``.
An I/O error in backward is kept: collectives go on, and all ranks raise it in ``step()``, before anything has changed.
Memory: RING buffers of the largest shard, fp32. On the drive: 4 bytes per element of the shards.
Thread rule: as GradientReducer; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype, tensor_of
from zcomm.zero.cache.drain import drain
from zcomm.zero.cache.swap import SCRATCH
from zcomm.zero.gradients.norm import GradientNorm
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.worker import OnItsWay, Waits

RING = 3  # shards in RAM: one is reduced, one is written, one is read


def buffer_nbytes(shard_count: int) -> int:
    """Return the bytes of a buffer for the largest shard."""
    page = _core.page_nbytes()
    return -(-4 * shard_count // page) * page


def ring_nbytes(shard_counts: Sequence[int]) -> int:
    """Return the bytes of the ring for shards of these elements."""
    return min(RING, len(shard_counts)) * buffer_nbytes(max(shard_counts, default=0))


def drive_nbytes(shard_counts: Sequence[int]) -> int:
    """Return the bytes of the sums in a swap file; extents begin at pages."""
    return sum(buffer_nbytes(count) for count in shard_counts)


class SumRing:
    """The sums of ``order``, the buckets from the last to the first.

    views: the place of each bucket's shard in its buffer, by bucket, fp32 [shard_count]. number: of the buffer.
    wants_squares: whether steps take the norm before they update. knows_squares: ``add_squares`` reads no sum.
    """

    def __init__(self, order: Sequence[FlatBucket], arena: _core.PinnedArena, swap: _core.SwapFile) -> None:
        self._swap = swap
        count = min(RING, len(order))
        stride = buffer_nbytes(max((bucket.shard_count for bucket in order), default=0)) // 4
        memory = tensor_of(arena.allocate(4 * count * stride), torch.float32) if count else torch.empty(0)
        # Before the memory: attributes are dropped in this order, and a dropped Work is waited for.
        self._works: list[OnItsWay | None] = [None] * count
        self._reads = [False] * count  # whether the work is a read
        self._memory = memory
        self.number = {bucket.index: turn % count for turn, bucket in enumerate(order)}
        self.views = {
            bucket.index: memory[self.number[bucket.index] * stride :][: bucket.shard_count] for bucket in order
        }
        self._holds = [-1] * count  # bucket
        self._opened = -1  # buffer that a caller may still use
        self._changed = [False] * count  # and its sum is not what is on the drive
        self._taken = [0] * count  # pass of the reduction: one of the last pass may end in this one
        self._stored: set[int] = set()  # buckets with a sum on the drive
        self._error: BaseException | None = None
        self.nbytes = memory.nbytes
        self.drive_nbytes = sum(4 * bucket.shard_count for bucket in order)
        self._waits = Waits()
        self.held = self._forgotten = False  # an update still wants the sums; they are forgotten after it
        self.wants_squares = True
        self.knows_squares = False
        self._squares = [_core.ExactSum(), _core.ExactSum()]  # of sums that are stored, and of those that are consumed
        self._words = [torch.from_numpy(np.asarray(sum_)) for sum_ in self._squares]
        self._summing, self._pass = False, 0
        # Takes a sum, which is not stored then. Returns: its use, which must end before the buffer is used anew.
        self.consume: Callable[[int, torch.Tensor], OnItsWay | None] | None = None
        self.stays: set[int] = set()  # buckets with sums that are stored all the same
        self.gone = ""  # why there are no sums
        for bucket in order:
            swap.reserve(self._key(bucket.index), 4 * bucket.shard_count)

    @staticmethod
    def _key(bucket: int) -> str:
        return f"{SCRATCH}{bucket}"

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the drive."""
        return self._waits.seconds

    # --- one pass ---------------------------------------------------------------------------------------------

    def begin_pass(self, last: bool) -> None:
        """Begin a backward pass. last: no other one is expected to follow before the step."""
        self.knows_squares, self._summing = False, last and self.wants_squares
        self._pass += 1
        for squares in self._squares:
            squares.clear()

    def end_pass(self) -> None:
        """End it: all its reductions have begun."""
        self.knows_squares = self._summing

    def holder(self, bucket: int) -> int:
        """Return the bucket that has its sum in the buffer of ``bucket``, or -1."""
        return self._holds[self.number[bucket]]

    def take(self, bucket: int, load: bool) -> None:
        """Prepare the buffer of ``bucket`` for a reduction. load: with its sum. Keeps errors of the drive."""
        self._opened = -1
        number = self.number[bucket]
        if self._holds[number] != bucket:
            self._vacate(number)
            self._holds[number] = bucket
            if load:
                self._load(bucket)
        elif load and self._error is None and not self._is_known(bucket):
            self.views[bucket].zero_()
        self._settle(number)
        self._changed[number], self._taken[number] = True, self._pass

    def store(self, bucket: int) -> None:
        """Take the squares of a sum that has been reduced, and start to write it. Keeps errors of the drive."""
        number = self.number[bucket]
        if self._holds[number] != bucket or not self._changed[number]:
            return
        if self._summing and self._taken[number] == self._pass:
            view = self.views[bucket]
            squares = self._squares[self._consumes(bucket)]
            squares.add_squares(view.data_ptr(), core_dtype(view.dtype), view.numel())
        self._write(number)

    # --- between passes ---------------------------------------------------------------------------------------

    def open(self, bucket: int, change: bool = False) -> torch.Tensor:
        """Return the sum of ``bucket``, valid until another one is opened. change: it may be changed. Raises: OSError
        where sums are lost."""
        if bucket not in self.stays and (self.gone or self.consume is not None):
            raise RuntimeError(f"the sum of a gradient: {self.gone or 'backward uses it up'}")
        self._opened = number = self.number[bucket]
        if self._holds[number] != bucket:
            self._vacate(number)
            self._holds[number] = bucket
            self._load(bucket)
        if change or self._reads[number]:
            self._settle(number)
        self.check()
        if change:
            self._changed[number] = True
            self.knows_squares = self._summing = False
        return self.views[bucket]

    def expect(self, bucket: int) -> None:
        """Start to read the sum of ``bucket``, which is wanted next.

        Does nothing where that has to wait for its buffer, or the sum that was opened last is there.
        """
        number = self.number.get(bucket)
        if number is None or number == self._opened or self._changed[number] or bucket not in self._stored:
            return
        if self._holds[number] == bucket:
            return
        work = self._works[number]
        if work is not None and not work.done():
            return
        self._settle(number)
        self._holds[number] = bucket
        self._load(bucket)

    def finish(self) -> None:
        """Wait until all sums are on the drive. Raises: OSError where one is lost."""
        for number in range(len(self._works)):
            if self._changed[number]:
                self._write(number)
        for number in range(len(self._works)):
            self._settle(number)
        self.check()

    def check(self) -> None:
        """Raise OSError where sums of this step are lost."""
        if self._error is not None:
            error = self._error
            code = error.errno if isinstance(error, OSError) else None
            what = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            words = f"the gradients of this step are lost ({what})"
            if self.consume is None and not self.gone:
                words += ": call zero_grad() and run backward again"
            raise OSError(code, words) from error

    def add_squares(self, norm: GradientNorm, buckets: Sequence[FlatBucket]) -> None:
        """Add the squares of the sums of ``buckets``, all that there are, to ``norm``, and those of consumed sums."""
        for consumed, (squares, words) in enumerate(zip(self._squares, self._words, strict=True)):
            if self.knows_squares or (consumed and self.consume is not None):
                squares.normalize()
                norm.add_words(words)
        if self.knows_squares:
            return
        for position, bucket in enumerate(buckets):
            sum_ = self.open(bucket.index)
            if position + 1 < len(buckets):
                self.expect(buckets[position + 1].index)
            norm.add(sum_)
        self._opened = -1

    def forget(self) -> None:
        """Make all sums zero, whatever has become of them; moves nothing. Where they are held, after ``release``."""
        self._forgotten, self.gone = self.held, ""
        if self.held:
            return
        for number in range(len(self._works)):
            self._settle(number)
        if self._error is not None:
            drain(self._swap)  # an interrupt may have kept a write that it had just begun
            for bucket in self.number:  # a key with a failed write must not reach the copy of a save
                self._swap.release(self._key(bucket))
                self._swap.reserve(self._key(bucket), 4 * self.views[bucket].numel())
        self._error = None
        self._holds = [-1] * len(self._works)
        self._changed = [False] * len(self._works)
        self._stored.clear()
        self.knows_squares = self._summing = False

    def release(self) -> None:
        """End ``held``."""
        self.held = False
        if self._forgotten:
            self.forget()

    # --- one buffer -------------------------------------------------------------------------------------------

    def _consumes(self, bucket: int) -> bool:
        return self.consume is not None and bucket not in self.stays

    def _is_known(self, bucket: int) -> bool:
        return bucket in self._stored or self._changed[self.number[bucket]]

    def _vacate(self, number: int) -> None:
        """Wait until the buffer's sum, if it has one, is on the drive."""
        if self._changed[number]:
            self._write(number)
        self._settle(number)

    def _load(self, bucket: int) -> None:
        """Bring the sum of ``bucket`` into its buffer, which is its own: start to read it, or make it zero."""
        number, view = self.number[bucket], self.views[bucket]
        if bucket not in self._stored:
            view.zero_()
            self._changed[number] = True
        elif self._error is None:
            self._start(number, True)

    def _write(self, number: int) -> None:
        self._settle(number)
        self._changed[number] = False
        if self.consume is not None and self._consumes(self._holds[number]):
            self._works[number] = self.consume(self._holds[number], self.views[self._holds[number]])
            return
        if self._error is None:
            self._stored.add(self._holds[number])
            self._start(number, False)

    def _start(self, number: int, reads: bool) -> None:
        bucket = self._holds[number]
        view, act = self.views[bucket], self._swap.read if reads else self._swap.write
        try:
            self._works[number] = act(self._key(bucket), view.data_ptr(), view.nbytes)
            self._reads[number] = reads
        except Exception as error:
            self._keep(error)

    def _settle(self, number: int) -> None:
        """Wait until nothing reads or writes the buffer. Keeps errors."""
        work = self._works[number]
        if work is None:
            return
        try:
            self._waits.wait(work)
        except Exception as error:  # after an interrupt it is waited for again
            self._keep(error)
        self._works[number], self._reads[number] = None, False

    def _keep(self, error: BaseException) -> None:
        self._error = self._error or error

    def lose(self, error: BaseException) -> None:
        """Count all sums as lost, until ``forget``: ``error`` has ended something here half way."""
        self._keep(error)
        self.knows_squares = self._summing = False

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Count all sums as lost where an error or an interrupt ends the block."""
        try:
            yield
        except BaseException as error:
            self.lose(error)
            raise

    def close(self) -> None:
        """Wait for what is in flight, and free the ring."""
        self._works = [None] * len(self._works)
        drain(self._swap)
        self.views.clear()
        self._memory = torch.empty(0)
