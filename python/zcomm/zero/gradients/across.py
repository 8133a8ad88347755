"""AcrossGroups: the second hop of a reduction, for shard groups with copies of the shards ([Note: groups]).

[Note: sums of groups] In each pass the first hop adds the sums of this rank's shard group to the accumulators. In the
last pass that the step expects, the second hop follows it, bucket by bucket. It adds the groups' sums in their order,
in place, and divides once. So all copies of a shard have the same bits, which do not depend on bucket size, overlap or
tier. Only one pass of a step moves bytes between groups. ``complete`` runs the second hop of all buckets, if the last
pass was not known, or if the program looks at gradients earlier. A pass after that, or after the expected last one,
adds its own mean, and has staging slots for its sums. With ``MeshComms.each_pass`` all passes run both hops and add
their means, which has the bits of one shard group that adds in the same order.
With [Note: hpZ] the second hop is a reduce_scatter: a rank has the mean of its piece only.
An operation across groups begins when the first hop has ended (``Communicator.after``), on the thread of ``across``.
Memory: staging slots, if a step has such passes: 4 bytes per element of the largest shard, one for each slot.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zcomm.comm.work import Work
from zcomm.zero.gradients.coded import AcrossCodec
from zcomm.zero.groups.mesh_comms import MeshComms
from zcomm.zero.layout.flat import FlatBucket


class AcrossGroups:
    """The hops across groups of some buckets. hops: there are some; otherwise sums of the shard group are the means.
    staged: this pass adds its mean to means. torn: as of Transport."""

    def __init__(
        self, comms: MeshComms, buckets: Sequence[FlatBucket], slots: int, codec: AcrossCodec | None = None
    ) -> None:
        self.comms, self.comm, self.hops = comms, comms.across, comms.hops
        self.divisor: int | torch.Tensor = comms.divide_by
        self._largest = max((bucket.held_count for bucket in buckets), default=0)
        self._slots, self._memory = slots, list[torch.Tensor]()
        self.staged, self._follows, self.torn = False, self.hops, False
        self.codec = codec

    def begin_pass(self, last: bool, means: bool) -> None:
        """Begin a pass. last: the sums go across groups now; the step expects no other pass after it, or all passes do
        so. means: the accumulators hold means."""
        self.staged, self._follows = means, last or means

    def slot(self, number: int, bucket: FlatBucket) -> torch.Tensor:
        """Return the staging slot for a bucket."""
        if not self._memory:
            self._memory = [self.allocate(self._largest) for _ in range(self._slots)]
        return self._memory[number][: bucket.held_count]

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count)

    def follow(
        self, first: Work | None, sum_: torch.Tensor, target: torch.Tensor, name: str, bucket: FlatBucket
    ) -> Work | None:
        """Make the mean of ``sum_``, which the operation ``first`` fills, if this pass does so. Add it to ``target``,
        if that is not ``sum_``. None: earlier work on the device fills it."""
        if not self._follows:
            return first
        return Work(_Hop(self, first, bucket, sum_, target, f"{name}, across groups"))

    def form(self, bucket: FlatBucket) -> dict[str, Any]:
        """Return the keywords of the sum of a bucket over groups: without a codec in their order."""
        return {"order": "rank"} if self.codec is None else self.codec.arguments(bucket)

    def mean(self, bucket: FlatBucket, sum_: torch.Tensor, name: str) -> torch.Tensor:
        """Make the mean of ``sum_``, in place, wait, and return this rank's part of it. Collective."""
        mine = sum_[bucket.of_held]
        if self.comm is not None:
            for work in self.start(bucket, sum_, mine, f"{name}, across groups"):
                work.wait()
            if self.codec is not None:
                self.codec.ended(bucket.index)
        return mine.div_(self.divisor)

    def start(self, bucket: FlatBucket, sum_: torch.Tensor, mine: torch.Tensor, name: str) -> list[Work]:
        """Start to add ``sum_`` of all groups, in place: all of it, or ``mine``, this rank's part. Collective."""
        assert self.comm is not None
        form = self.form(bucket)
        if bucket.groups == 1:
            work: Work = self.comm.all_reduce(sum_, async_op=True, name=name, **form)
            return [work]
        return [work_of(self.comm.reduce_scatter(sum_, out=mine, async_op=True, name=name, **form))]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._memory)

    def close(self) -> None:
        self._memory.clear()
        if self.codec is not None:
            self.codec.close()


def work_of(started: object) -> Work:
    """Return the Work of an asynchronous collective with an output."""
    assert isinstance(started, tuple) and isinstance(started[1], Work)
    return started[1]


class _Hop:
    """An operation of a shard group, and the one across groups behind it. ``wait`` divides and adds."""

    def __init__(
        self,
        groups: AcrossGroups,
        first: Work | None,
        bucket: FlatBucket,
        sum_: torch.Tensor,
        target: torch.Tensor,
        name: str,
    ) -> None:
        self._groups, self._mine = groups, sum_[bucket.of_held]
        self._target = None if target is sum_ else target[bucket.of_held]
        self._works, self._ended = [work for work in (first,) if work is not None], False
        try:
            if groups.comm is not None:
                self._works += [groups.comm.after(work) for work in self._works]
                self._works += groups.start(bucket, sum_, self._mine, name)
        except Exception as error:
            groups.comms.fail(error)
            raise

    def wait(self, timeout: float | None = None) -> None:
        try:
            for work in self._works:
                work.wait(timeout)
        except Exception as error:
            if timeout is None:  # otherwise the operation may still end well
                self._groups.comms.fail(error)
            raise
        if self._ended:
            return
        self._groups.torn = True
        mean = self._mine.div_(self._groups.divisor)
        if self._target is not None:
            self._target.add_(mean)
        self._ended, self._groups.torn = True, False

    def done(self) -> bool:
        return self._works[-1].done()
