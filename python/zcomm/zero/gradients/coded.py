"""Codecs of gradients: the arguments of each bucket's reduction, and the errors that it leaves ([Note: coded sums]).

[Note: coded sums] With ``Compression(gradients=)`` a rank encodes a bucket's gradients, and keeps the residue: its
*errors*. It adds them to the bucket's next gradients before it encodes these (error feedback). With one shard
group the codec is of the sum over it. With copies of shards in other groups it is of the sum across groups, and of both
with ``hops="all"``. Gradients that are reduced late ([Note: arrivals]) and sums of a world of one are exact.
Errors are of gradients times the loss scale and the number of micro-steps, so they are multiplied when this factor
changes. A skipped step loses one step's errors. No checkpoint has them.
Memory (fp32): in the shard group 4 bytes for each element of all buckets. Across groups 4 for each element of a shard
and of its part; with [Note: hpZ] once for each element of ``FlatBucket.held``. On hosts of several ranks a shard group
has errors of the sums of hosts only.
Thread rule: as GradientReducer; the executor of a communicator changes errors until its operation has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.codec import ERROR_DTYPES, CodedCall, Compression, factors_of, zero_error
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.zero.layout.flat import FlatBucket


class GradientErrors:
    """Errors by bucket, and their changes between steps. factor: of accumulated gradients over their mean."""

    def __init__(self, compression: Compression, factor: Callable[[], float]) -> None:
        self.compression, self._factor = compression, factor
        self._last, self._steps = factor(), 0
        self.of: dict[int, tuple[torch.Tensor, ...]] = {}
        self._factors: list[torch.Tensor] = []  # views that multiply all errors
        self._dtype = ERROR_DTYPES[compression.error_dtype]

    def _make(self, count: int, step: int) -> torch.Tensor:
        """Make an error of zero for ``count`` elements in parts of ``step``."""
        error = zero_error(self._dtype, count, step)
        self._factors += factors_of(error, count, step)
        return error

    def begin_step(self, settle: Callable[[], None]) -> None:
        """Begin a step: errors follow the factor, and restart at zero every ``reset_steps``. settle: waits for
        operations that change them."""
        factor, reset = self._factor(), self.compression.reset_steps
        restart = reset is not None and self._steps > 0 and self._steps % reset == 0
        self._steps += 1
        if restart or factor != self._last:
            settle()
            for each in self._each() if restart else self._factors:
                each.zero_() if restart else each.mul_(factor / self._last)
        self._last = factor

    def _each(self) -> Iterable[torch.Tensor]:
        return (error for errors in self.of.values() for error in errors)

    @property
    def nbytes(self) -> int:
        return sum(error.nbytes for error in self._each())

    def close(self) -> None:
        self.of.clear()
        self._factors.clear()


class ShardCodec(GradientErrors):
    """The codec of reduce_scatters in a shard group."""

    def __init__(
        self,
        compression: Compression,
        comm: Communicator,
        buckets: Sequence[FlatBucket],
        factor: Callable[[], float],
    ) -> None:
        super().__init__(compression, factor)
        parts = comm._coded_parts("Compression(gradients=)")
        self.of = {b.index: (self._make(b.held_count * parts, b.held_count),) for b in buckets}
        self._calls: dict[int, CodedCall] = {}

    def coding(self, bucket: FlatBucket) -> _core.Coding:
        """Return the core's arguments for a bucket: built once."""
        call = self._calls.get(bucket.index)
        if call is None:
            codec = self.compression.gradient_codec
            assert codec is not None
            error, keep = self.of[bucket.index][0], self.compression.keep
            call = self._calls[bucket.index] = CodedCall("reduce_scatter", codec, error, keep, "cpu")
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
    ) -> None:
        super().__init__(compression, factor)
        for bucket in buckets:
            if bucket.groups > 1:
                parts = comm._coded_parts("Compression(gradients=)")
                self.of[bucket.index] = (self._make(bucket.shard_count * parts, bucket.shard_count),)
                continue
            step, own = (_core.all_reduce_part(bucket.shard_count, rank, comm.world_size)[1] for rank in (0, comm.rank))
            self.of[bucket.index] = self._make(bucket.shard_count, step), self._make(own, step)

    def arguments(self, bucket: FlatBucket) -> dict[str, Any]:
        """Return the keywords of the operation for a bucket."""
        codec, keep, errors = self.compression.gradient_codec, self.compression.keep, self.of[bucket.index]
        return {"codec": codec, "error": errors if len(errors) > 1 else errors[0], "keep": keep}


def shard_nbytes(compression: Compression, buckets: Iterable[FlatBucket]) -> int:
    """Return the bytes of ShardCodec's errors, if its ranks are on one host or on hosts of their own."""
    dtype = ERROR_DTYPES[compression.error_dtype]
    counts = (_core.error_count(core_dtype(dtype), bucket.count, bucket.held_count) for bucket in buckets)
    return sum(counts) * dtype.itemsize


def across_nbytes(compression: Compression, buckets: Iterable[FlatBucket], groups: int) -> int:
    """Return the bytes of AcrossCodec's errors on the ranks of the first group, which have most."""
    dtype = ERROR_DTYPES[compression.error_dtype]

    def count_of(count: int, step: int) -> int:
        return _core.error_count(core_dtype(dtype), count, step)

    total = 0
    for bucket in buckets:
        shard = bucket.shard_count
        if bucket.groups > 1:
            total += count_of(bucket.held_count, shard)
        else:
            step = _core.all_reduce_part(shard, 0, groups)[1]
            total += count_of(shard, step) + count_of(step, step)
    return total * dtype.itemsize
