"""WeightBases: the weights that the ranks sent last, so that gathers send differences to them.

[Note: differences of weights] With ``Compression(weights=, differences=True)`` each rank keeps all ranks' shards as it
received them last. These *bases* have the weights' dtype, and equal bits on all ranks. A gather after a step sends the
encoded difference of a shard to its base. Every rank adds the decoded difference to its bases, also the owner of the
shard, and passes compute with the bases. The difference of the next step contains the error of this one, so errors do
not add up, and the sources keep exact weights.
A gather sends a bucket in one of three ways, which all ranks choose alike by two counters:

* Exactly, for the first time and after a rewrite: a load, or the program's edit of its unit. A difference may then be
  as large as the weights.
* As a difference, after a step.
* Not at all, if its weights have not changed since: in backward, in further passes of a step, and frozen weights. Then
  its source is not read, either.

If a gather fails while bytes move, its buckets are sent exactly afterwards.
Memory: all weights that are gathered by units, whole, on each rank; allocated at construction.
Thread rule: ``change``, ``rewrite`` and ``stamp`` on the main thread, the rest on the gathering thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.units.unit import Unit

Stamp = tuple[int, int]  # counts of changes and of rewrites


class WeightBases:
    """The bases of some units. stepped: numbers of the buckets that steps change. keeps: False: there are no bases, and
    gathers send weights."""

    def __init__(self, dtype: torch.dtype, stepped: Collection[int] = (), keeps: bool = False) -> None:
        self._dtype, self._stepped, self.keeps = dtype, frozenset(stepped), keeps
        self._of: dict[int, torch.Tensor] = {}
        self._sent: dict[int, Stamp] = {}  # by bucket, of the weights in its base
        self._changes = self._rewrites = 0

    def reserve(self, units: Iterable[Unit]) -> None:
        """Allocate the bases of units, if there are to be any."""
        for bucket in buckets_of(units) if self.keeps else ():
            self._of[bucket.index] = torch.empty(bucket.count, dtype=self._dtype)

    def change(self) -> None:
        """Note that a step has changed weights. All ranks do so alike."""
        self._changes += 1

    def rewrite(self, unit: Unit | None = None) -> None:
        """Note that weights of a unit, None: of all, may have any values now. All ranks do so alike."""
        if unit is None:
            self._rewrites += 1
        else:
            unit.rewrites += 1

    def stamp(self, unit: Unit) -> Stamp:
        """Return the counts that identify the weights of a unit, for a gather that is about to be submitted."""
        return self._changes, self._rewrites + unit.rewrites

    def split(self, buckets: Sequence[FlatBucket], stamp: Stamp) -> tuple[list[FlatBucket], list[FlatBucket]]:
        """Return the buckets to send exactly, and those to send as differences; the bases of the rest are current."""
        exact, differ = [], []
        for bucket in buckets:
            sent = self._sent.get(bucket.index)
            if sent is None or sent[1] != stamp[1]:
                exact.append(bucket)
            elif sent[0] != stamp[0] and bucket.index in self._stepped:
                differ.append(bucket)
        return exact, differ

    def begin(self, buckets: Sequence[FlatBucket]) -> list[torch.Tensor]:
        """Return the bases of buckets, which are about to be changed."""
        for bucket in buckets:
            self._sent.pop(bucket.index, None)
        return [self._of[bucket.index] for bucket in buckets]

    def end(self, buckets: Sequence[FlatBucket], stamp: Stamp) -> None:
        """Note that the bases of buckets have the weights of ``stamp``."""
        self._sent.update(dict.fromkeys((bucket.index for bucket in buckets), stamp))

    def copy(self, bucket: FlatBucket, whole: torch.Tensor) -> None:
        """Copy the base of a bucket to ``whole``."""
        whole.copy_(self._of[bucket.index])

    @property
    def nbytes(self) -> int:
        return sum(base.nbytes for base in self._of.values())

    def close(self) -> None:
        self._of.clear()
        self._sent.clear()


def buckets_of(units: Iterable[Unit]) -> list[FlatBucket]:
    """Return the buckets with bases, which belong to units that are gathered whole."""
    return [bucket for unit in units if not unit.by_rows for bucket in unit.buckets]
