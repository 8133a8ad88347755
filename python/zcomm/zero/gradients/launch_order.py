"""LaunchOrder: the order in which all ranks reduce buckets, learned from one backward pass.

[Note: launch order] Until a pass has been seen, the last bucket is launched first. That is a guess: the root unit's
bucket is number 0, and lm_head's gradient in it arrives first. Gradients that have arrived wait for their bucket's
turn. So the first pass records the arrival of each bucket's last gradient. Rank 0's order is broadcast behind the pass,
and all ranks launch in it from the next pass on. The order decides when a bucket is reduced, never its sum: no bit
depends on it.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.zero.layout.flat import FlatBucket


class LaunchOrder:
    """The launch order of ``buckets``, all that are trained, over the ranks of ``comm``."""

    def __init__(self, buckets: Sequence[FlatBucket], comm: Communicator) -> None:
        self._buckets, self._comm = list(buckets), comm
        self._observes = len(self._buckets) > 1
        self._arrivals: dict[int, None] = {}  # numbers of buckets, in the order of their last gradients
        self._found: torch.Tensor | None = None
        self._work: Work | None = None

    def arrived(self, bucket: int) -> None:
        """Record a gradient of bucket number ``bucket``."""
        if self._observes:
            self._arrivals.pop(bucket, None)
            self._arrivals[bucket] = None

    def forget(self) -> None:
        """Forget a pass that failed."""
        self._arrivals.clear()

    def end_pass(self) -> None:
        """Start to broadcast rank 0's order, after the first pass. Collective; does not wait."""
        if not self._observes:
            return
        self._observes = False
        self._found = torch.tensor(order_of(list(self._arrivals), len(self._buckets)))
        if self._comm.world_size > 1:
            self._work = self._comm.broadcast([self._found], async_op=True, name="launch order of gradients")

    def take(self) -> list[FlatBucket] | None:
        """Return the order that was found, once; None: it does not change. Waits for rank 0."""
        if self._found is None:
            return None
        if self._work is not None:
            self._work.wait()
        order = [self._buckets[number] for number in self._found.tolist()]
        self._found = self._work = None
        return order

    def is_waiting(self) -> bool:
        """Return True if ``close`` would wait for other ranks."""
        return self._work is not None and not self._work.done()

    def close(self) -> None:
        self._found = self._work = None


def order_of(arrivals: Sequence[int], count: int) -> list[int]:
    """Return the numbers of ``count`` buckets in the order of ``arrivals``. A bucket without gradients follows its
    neighbour of the next number, as in backward."""
    order = list(arrivals)
    for number in sorted(set(range(count)).difference(arrivals), reverse=True):
        order.insert(order.index(number + 1) + 1 if number + 1 < count else 0, number)
    return order
