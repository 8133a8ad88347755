"""AcrossGroups: the second hop of a reduction, for shard groups with copies of the shards ([Note: groups]).

The first hop leaves the sum over this rank's shard group in a staging slot, fp32. This one adds the slots of all groups
in their order, divides once, and adds to the accumulator. So all copies of a shard have the same bits. They do not
depend on bucket size, overlap or tier.
Memory: as many staging slots as there are slots of gradients, 4 bytes per element of the largest shard each.
Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from zcomm.comm.work import Work
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.mesh_comms import MeshComms


class AcrossGroups:
    """Staging slots, and sums across the groups in launch order."""

    def __init__(self, comms: MeshComms, buckets: Sequence[FlatBucket], count: int) -> None:
        self._comm, self._divide_by = comms.across, comms.divide_by
        largest = max((bucket.shard_count for bucket in buckets), default=0)
        empty = torch.empty if self._comm is None else self._comm.empty
        self._memory = [empty(largest, dtype=torch.float32) for _ in range(count)]
        self._pending: deque[_Hop] = deque()

    def slot(self, number: int, bucket: FlatBucket) -> torch.Tensor:
        """Return the memory for a sum over the shard group."""
        return self._memory[number][: bucket.shard_count]

    def follow(self, first: Work, slot: torch.Tensor, shard: torch.Tensor, accumulate: bool, name: str) -> _Hop:
        """Add ``slot`` of all groups to ``shard`` when the operation ``first``, which fills it, has ended."""
        hop = _Hop(self, first, slot, shard, accumulate, name)
        self._pending.append(hop)
        return hop

    def run(self, hop: _Hop) -> None:
        """End the hops up to ``hop``, in launch order."""
        while hop in self._pending:
            first = self._pending.popleft()
            first.first.wait()
            self.add(first.slot, first.shard, first.accumulate, first.name)

    def add(self, slot: torch.Tensor, shard: torch.Tensor, accumulate: bool, name: str) -> None:
        """Add ``slot`` of all groups to ``shard``, and wait. Changes ``slot``. Collective."""
        if self._comm is not None:
            self._comm.all_reduce(slot, name=f"{name}, across groups")
        if accumulate:
            shard.add_(slot.div_(self._divide_by))
        else:
            torch.div(slot, self._divide_by, out=shard)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._memory)

    def close(self) -> None:
        self._pending.clear()
        self._memory.clear()


class _Hop:
    """An operation of a shard group, and the one across groups that follows it."""

    def __init__(
        self, groups: AcrossGroups, first: Work, slot: torch.Tensor, shard: torch.Tensor, accumulate: bool, name: str
    ) -> None:
        self._groups, self.first, self.name = groups, first, name
        self.slot, self.shard, self.accumulate = slot, shard, accumulate

    def wait(self, timeout: float | None = None) -> None:
        self._groups.run(self)

    def done(self) -> bool:
        return False
