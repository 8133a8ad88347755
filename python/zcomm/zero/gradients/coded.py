"""Codecs of gradients: the arguments of each bucket's reduction, and the errors that it leaves ([Note: coded sums]).

[Note: coded sums] With ``Compression(gradients=)`` a rank encodes a bucket's gradients, and keeps the residue: its
*errors*. It adds them to the bucket's next gradients before it encodes these (error feedback). With one shard
group the codec is of the sum over it. With copies of shards in other groups it is of the sum across groups, and of both
with ``hops="all"``. Gradients that are reduced late ([Note: arrivals]) and sums of a world of one are exact.
Errors are of gradients times the loss scale and the number of micro-steps, so they are multiplied when this factor
changes. A skipped step loses one step's errors. No checkpoint has them.
With ``error_tier="nvme"`` errors are on a drive ([Note: errors on a drive]).
Memory (fp32): in the shard group 4 bytes for each element of all buckets. Across groups 4 for each element of a shard
and of its part; with [Note: hpZ] once for each element of ``FlatBucket.held``. On hosts of several ranks a shard group
has errors of the sums of hosts only.
Thread rule: as GradientReducer; the executor of a communicator changes errors until its operation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.codec import ERROR_DTYPES, CodedCall, Compression, factors_of, zero_error
from zcomm.comm.communicator import Communicator
from zcomm.zero.cache.span_cache import whole_pages
from zcomm.zero.gradients.error_ring import ErrorDrive, ErrorRing, error_sizes, item_nbytes, ring_nbytes
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.poison import broadcast_error, check_error

Counts = Sequence[tuple[int, int]]  # of each error of a bucket: elements, in parts of so many


class GradientErrors:
    """Errors by bucket, and their changes between steps. factor: of accumulated gradients over their mean.

    counts: of each bucket, in launch order. drive: None: the errors are in memory.
    """

    def __init__(
        self,
        compression: Compression,
        factor: Callable[[], float],
        counts: Mapping[int, Counts],
        drive: ErrorDrive | None,
    ) -> None:
        self.compression, self._factor = compression, factor
        self._last, self._steps = factor(), 0
        dtype = ERROR_DTYPES[compression.error_dtype]
        self._ring = None if drive is None else ErrorRing(drive, type(self).__name__, error_sizes(dtype, counts))
        self.of: dict[int, tuple[torch.Tensor, ...]] = {}
        self._factors: dict[int, list[torch.Tensor]] = {}  # views that multiply all errors of a bucket
        for index, each in counts.items():
            made = (
                tuple(zero_error(dtype, *count) for count in each)
                if self._ring is None
                else self._ring.of(index, dtype)
            )
            self.of[index] = made
            self._factors[index] = [view for error, c in zip(made, each, strict=True) for view in factors_of(error, *c)]

    def begin_step(self, settle: Callable[[], None]) -> None:
        """Begin a step: errors follow the factor, and restart at zero every ``reset_steps``. settle: waits for
        operations that change them."""
        factor, reset = self._factor(), self.compression.reset_steps
        restart = reset is not None and self._steps > 0 and self._steps % reset == 0
        self._steps += 1
        change = 0.0 if restart else factor / self._last
        if self._ring is not None:
            self._ring.change(change)
        elif change != 1.0:
            settle()
            for index in self.of:
                self._multiply(index, change)
        self._last = factor

    def _multiply(self, index: int, change: float) -> None:
        for each in self.of[index] if change == 0.0 else self._factors[index] if change != 1.0 else ():
            each.zero_() if change == 0.0 else each.mul_(change)  # a product with zero might not be zero

    def take(self, bucket: FlatBucket) -> tuple[torch.Tensor, ...]:
        """Return the errors of a bucket, which an operation changes until ``ended``."""
        if self._ring is not None:
            self._multiply(bucket.index, self._ring.take(bucket.index))
        return self.of[bucket.index]

    def ended(self, index: int) -> None:
        """Keep the errors of a bucket that an operation has changed, if there was one."""
        if self._ring is not None:
            self._ring.ended(index)

    def check(self, comm: Communicator) -> None:
        """Raise OSError on all ranks if one has lost errors on its drive; they restart at zero. Collective then."""
        if self._ring is None:
            return
        lost = self._ring.lost()
        if lost is not None:
            broadcast_error(comm, lost)
            raise lost
        check_error(comm)

    def nbytes(self, tier: str) -> list[tuple[str, str, int]]:
        """Return the bytes by tier and purpose. tier: of memory."""
        if self._ring is not None:
            return self._ring.nbytes
        return [(tier, "errors", sum(error.nbytes for errors in self.of.values() for error in errors))]

    def close(self) -> None:
        self.of.clear()
        self._factors.clear()
        if self._ring is not None:
            self._ring.close()


class ShardCodec(GradientErrors):
    """The codec of reduce_scatters in a shard group."""

    def __init__(
        self,
        compression: Compression,
        comm: Communicator,
        buckets: Sequence[FlatBucket],
        factor: Callable[[], float],
        drive: ErrorDrive | None = None,
    ) -> None:
        parts = comm._coded_parts("Compression(gradients=)")
        super().__init__(compression, factor, {b.index: [(b.held_count * parts, b.held_count)] for b in buckets}, drive)
        self._calls: dict[int, CodedCall] = {}

    def coding(self, bucket: FlatBucket) -> _core.Coding:
        """Return the core's arguments for a bucket: built once."""
        call, errors = self._calls.get(bucket.index), self.take(bucket)
        if call is None:
            codec = self.compression.gradient_codec
            assert codec is not None
            keep = self.compression.keep
            call = self._calls[bucket.index] = CodedCall("reduce_scatter", codec, errors[0], keep, "cpu")
        return call.coding

    def close(self) -> None:
        self._calls.clear()
        super().close()


class AcrossCodec(GradientErrors):
    """The codec of all_reduces across groups, or with [Note: hpZ] of reduce_scatters."""

    def __init__(
        self,
        compression: Compression,
        comm: Communicator,
        buckets: Sequence[FlatBucket],
        factor: Callable[[], float],
        drive: ErrorDrive | None = None,
    ) -> None:
        parts = comm._coded_parts("Compression(gradients=)") if any(bucket.groups > 1 for bucket in buckets) else 1

        def counts(bucket: FlatBucket) -> Counts:
            if bucket.groups > 1:
                return [(bucket.shard_count * parts, bucket.shard_count)]
            ranks = (0, comm.rank)
            step, own = (_core.all_reduce_part(bucket.shard_count, rank, comm.world_size)[1] for rank in ranks)
            return [(bucket.shard_count, step), (own, step)]

        super().__init__(compression, factor, {bucket.index: counts(bucket) for bucket in buckets}, drive)

    def arguments(self, bucket: FlatBucket) -> dict[str, Any]:
        """Return the keywords of the operation for a bucket."""
        codec, keep, errors = self.compression.gradient_codec, self.compression.keep, self.take(bucket)
        return {"codec": codec, "error": errors if len(errors) > 1 else errors[0], "keep": keep}


def shard_counts(buckets: Iterable[FlatBucket]) -> dict[int, Counts]:
    """Return the counts of ShardCodec's errors, if its ranks are on one host or on hosts of their own."""
    return {bucket.index: [(bucket.count, bucket.held_count)] for bucket in buckets}


def across_counts(buckets: Iterable[FlatBucket], groups: int) -> dict[int, Counts]:
    """Return the counts of AcrossCodec's errors on the ranks of the first group, which have most."""
    found: dict[int, Counts] = {}
    for bucket in buckets:
        step = _core.all_reduce_part(bucket.shard_count, 0, groups)[1]
        shared = [(bucket.shard_count, step), (step, step)]
        found[bucket.index] = [(bucket.held_count, bucket.shard_count)] if bucket.groups > 1 else shared
    return found


def planned_nbytes(
    compression: Compression, buckets: Sequence[FlatBucket], groups: int, inner: bool
) -> tuple[int, int, int]:
    """Return the bytes of all errors, on a drive also with whole pages and of the windows in memory. inner: sums in the
    shard group are encoded; groups: if more than one, sums across them are, too."""
    dtype, total, drive, windows = ERROR_DTYPES[compression.error_dtype], 0, 0, 0
    for counts in ([across_counts(buckets, groups)] if groups > 1 else []) + ([shard_counts(buckets)] if inner else []):
        sizes = error_sizes(dtype, counts)
        total += sum(sum(each) for each in sizes.values())
        drive += sum(whole_pages(item_nbytes(each)) for each in sizes.values())
        windows += ring_nbytes(sizes)
    return total, drive, windows
