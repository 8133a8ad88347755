"""WeightsAcross: new weights of the pieces that ranks of other groups update ([Note: hpZ]), bucket by bucket.

[Note: weights across] A rank keeps a part of each bucket, and updates a piece of that part. After the update an
asynchronous all_gather fills the part with the pieces of all groups, concurrently with the next updates. All ranks
start the gathers in the order of updates. A rank with a failed update starts the rest, too, because the others wait for
them. In the shard group a barrier follows the last gather (``Communicator.after``) and shows the new weights. So an
error across groups becomes the error of the whole group.
Invariant: in the shard group only that barrier, which is later than all buckets, waits for gathers.
Thread rule: as ParameterStore.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import torch

from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.zero.layout.flat import FlatBucket


class WeightsAcross:
    """The gathers of one store. comm: the ranks of other groups with the same part of each bucket; None: there are
    none, and nothing is gathered. codec: None: weights are sent exactly. moved_nbytes: of gathered parts, as sent."""

    def __init__(self, comm: Communicator | None, codec: Codec | None = None) -> None:
        self.comm, self.codec = comm, codec
        self.moved_nbytes = 0
        self._works: dict[int, Work] = {}  # by bucket, in order
        self._entry: Work | None = None  # of the shard group's communicator, behind the last of them

    def start(self, bucket: FlatBucket, mine: torch.Tensor, held: torch.Tensor) -> None:
        """Start to fill ``held``, the bucket's part ``FlatBucket.held``, from all ranks' new pieces; this one's is
        ``mine``."""
        if self.comm is None:
            return
        name = f"new weights of bucket {bucket.index}"
        started = self.comm.all_gather(mine, out=held, async_op=True, name=name, codec=self.codec)
        assert isinstance(started, tuple)
        self._works[bucket.index] = started[1]
        sent = mine.nbytes if self.codec is None else self.codec.encoded_nbytes(mine.numel())
        self.moved_nbytes += sent * self.comm.world_size

    def not_started(self, buckets: Iterable[FlatBucket]) -> list[FlatBucket]:
        """Return the ``buckets`` without a gather, in their order."""
        return [bucket for bucket in buckets if bucket.index not in self._works]

    def precede(self, shard: Communicator) -> None:
        """Let later operations of ``shard`` start when the started gathers have ended. They fail with a gather's
        error."""
        if self._works:
            self._entry = shard.after(next(reversed(self._works.values())))

    def finish(self) -> None:
        """Wait for the started gathers. Raises: the first error, after all have ended."""
        works = list(self._works.values())
        self._works.clear()
        for number, work in enumerate(works):
            try:
                work.wait()
            except Exception:
                for other in works[number + 1 :]:
                    with suppress(Exception):
                        other.wait()
                raise
