"""AcrossGroups: the second hop of a reduction, for shard groups with copies of the shards ([Note: groups]).

[Note: sums of groups] In each pass the first hop adds the sums of this rank's shard group to the accumulators. In the
last pass that the step expects, the second hop follows it, bucket by bucket. It adds the groups' sums in their order,
in place, and divides once. So all copies of a shard have the same bits, which do not depend on bucket size, overlap or
tier. Only one pass of a step moves bytes between groups. ``complete`` runs the second hop of all buckets, if the last
pass was not known, or if the program looks at gradients earlier. A pass after that, or after the expected last one,
adds its own mean, and has staging slots for its sums.
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
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.mesh_comms import MeshComms


class AcrossGroups:
    """The hops across groups of some buckets. staged: this pass adds its mean to means. torn: as of Transport."""

    def __init__(
        self, comms: MeshComms, buckets: Sequence[FlatBucket], slots: int, codec: AcrossCodec | None = None
    ) -> None:
        self.comm, self.divide_by = comms.across, comms.divide_by
        self._largest = max((bucket.shard_count for bucket in buckets), default=0)
        self._slots, self._memory = slots, list[torch.Tensor]()
        self.staged, self._follows, self.torn = False, True, False
        self.codec = codec

    def begin_pass(self, last: bool, means: bool) -> None:
        """Begin a pass. last: the step expects no other one after it. means: the accumulators hold means."""
        self.staged, self._follows = means, last or means

    def slot(self, number: int, bucket: FlatBucket) -> torch.Tensor:
        """Return the staging slot for a bucket."""
        if not self._memory:
            self._memory = [torch.empty(self._largest) for _ in range(self._slots)]
        return self._memory[number][: bucket.shard_count]

    def follow(self, first: Work, sum_: torch.Tensor, target: torch.Tensor, name: str, bucket: FlatBucket) -> Work:
        """Make the mean of ``sum_``, which the operation ``first`` fills, if this pass does so. Add it to ``target``,
        if that is not ``sum_``."""
        if not self._follows:
            return first
        return Work(_Hop(self, first, sum_, target, f"{name}, across groups", self.form(bucket)))

    def form(self, bucket: FlatBucket | None) -> dict[str, Any]:
        """Return the keywords of the all_reduce of a bucket's sums; None: exact, in order of the groups."""
        return {"order": "rank"} if self.codec is None or bucket is None else self.codec.arguments(bucket)

    def mean(self, sum_: torch.Tensor, name: str, bucket: FlatBucket | None = None) -> None:
        """Make the mean of ``sum_``, in place, and wait. Collective. bucket: has the codec's errors; None: exact."""
        if self.comm is not None:
            self.comm.all_reduce(sum_, name=f"{name}, across groups", **self.form(bucket))
        sum_.div_(self.divide_by)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._memory)

    def close(self) -> None:
        self._memory.clear()
        if self.codec is not None:
            self.codec.close()


class _Hop:
    """An operation of a shard group, and the one across groups behind it. ``wait`` divides and adds."""

    def __init__(
        self,
        groups: AcrossGroups,
        first: Work,
        sum_: torch.Tensor,
        target: torch.Tensor,
        name: str,
        form: dict[str, Any],
    ) -> None:
        self._groups, self._sum, self._target = groups, sum_, target
        self._works, self._ended = [first], False
        if groups.comm is not None:
            self._works.append(groups.comm.after(first))
            self._works.append(groups.comm.all_reduce(sum_, async_op=True, name=name, **form))

    def wait(self, timeout: float | None = None) -> None:
        for work in self._works:
            work.wait(timeout)
        if self._ended:
            return
        self._groups.torn = True
        mean = self._sum.div_(self._groups.divide_by)
        if self._target is not self._sum:
            self._target.add_(mean)
        self._ended, self._groups.torn = True, False

    def done(self) -> bool:
        return self._works[-1].done()
