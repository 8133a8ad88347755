"""CodedCopies: the store of hpZ, if new weights cross groups encoded ([Note: encoded copies]).

[Note: encoded copies] A rank has its piece of each bucket in memory of its own, exactly; updates, checkpoints and whole
tensors read that. The host's copy has the decoded bytes that crossed, of all pieces, also the rank's own. So all ranks
compute with equal weights. The model's parameters are views of the copy. An element that the program has written to
differs from the copy's, and becomes exact as it was written.
Memory: the weights' bytes for each element of a piece.
Thread rule: as ParameterStore. Source: ZeRO++ (arXiv:2306.10209).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket
from zcomm.zero.params.stores import SharedStore, StoreForm


class CodedCopies(SharedStore):
    """See the head of this file. codec: of new weights."""

    def __init__(self, form: StoreForm, without: Collection[int], across: Communicator, codec: Codec) -> None:
        super().__init__(form, without, across, codec)
        here = (bucket for bucket in form.geometry.every if bucket.index in self._ranges)
        self._exact = {bucket.index: torch.empty(bucket.shard_count, dtype=form.dtype) for bucket in here}

    def _part(self, bucket: FlatBucket) -> torch.Tensor:
        return self._exact[bucket.index]

    def take_edits(self, settle: Callable[[], None] | None = None) -> None:
        for bucket in self._geometry.every:
            if bucket.index in self._exact:
                self._write_edits(bucket, self._exact[bucket.index])
        super().take_edits(settle)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        if self._view is None or self._merged or not self._view.copied():
            return self._exact[bucket.index][part]
        weight = self._exact[bucket.index].clone()
        self._write_edits(bucket, weight)
        return weight[part]

    def _write_edits(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        """Write the elements of this rank's piece that the program has changed, to ``weight``."""
        if self._view is None or self._merged:
            return
        size, first = self._dtype.itemsize, self._ranges[bucket.index].start + bucket.part.start
        for begin, end in self._view.copied():  # bytes
            low, high = max(begin // size, first), min(end // size, first + bucket.shard_count)
            if low < high:
                seen, there = self._seen[low:high], self._flat[low:high]
                changed = seen.view(torch.uint8).view(-1, size) != there.view(torch.uint8).view(-1, size)
                mask = changed.any(1)
                weight[low - first : high - first][mask] = seen[mask]

    def full(self, param: int) -> torch.Tensor:
        """Return a copy of a whole parameter, exactly. Collective."""
        bucket = self._geometry.bucket_of(param)
        held, whole = (torch.empty(count, dtype=self._dtype) for count in (bucket.held_count, bucket.count))
        name = f"whole weights of bucket {bucket.index}"
        assert self._across.comm is not None
        self._across.comm.all_gather(self.read(bucket), out=held, name=name)
        self._comm.all_gather(held, out=whole, name=name)
        return self._geometry.view(whole, param).clone()

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        found = super().nbytes_by_tier
        for index, exact in self._exact.items():
            found[self._tiers[index]] += exact.nbytes
        return found

    def close(self) -> None:
        super().close()
        self._exact.clear()
