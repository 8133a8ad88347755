"""UnsyncedGradients: unreduced gradients of passes without sync, or of later arrivals ([Note: arrivals]).

Thread rule: as GradientReducer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.gradients.across import AcrossGroups
from zcomm.zero.gradients.host import is_plain
from zcomm.zero.gradients.transport import ReducePlan
from zcomm.zero.layout.flat import FlatBucket


class UnsyncedGradients:
    """Sums by parameter, or block, in fp32. Memory: 4 bytes per unreduced element. plan: of blocks."""

    def __init__(self, plan: ReducePlan, accumulators: Accumulators) -> None:
        self._geometry, self._comms, self._accumulators = plan.geometry, plan.comms, accumulators
        self.sums: dict[int, torch.Tensor] = {}
        self._slots: dict[int, torch.Tensor] = {}  # by id() of their communicators

    def __bool__(self) -> bool:
        return bool(self.sums)

    @property
    def nbytes(self) -> int:
        return sum(sum_.nbytes for sum_ in self.sums.values())

    def add(self, index: int, dense: torch.Tensor) -> None:
        """Add a gradient of parameter ``index``."""
        sum_ = self.sums.get(index)
        if sum_ is not None:
            sum_ += dense
        elif dense.dtype == torch.float32 and is_plain(dense):
            self.sums[index] = dense
        else:
            self.sums[index] = dense.to(torch.float32, copy=True, memory_format=torch.contiguous_format)

    def take(self, index: int, dense: torch.Tensor | None) -> torch.Tensor | None:
        """Remove the unreduced sum of a gradient, and return it with ``dense`` added."""
        sum_ = self.sums.pop(index, None)
        if sum_ is None:
            return dense
        return sum_ if dense is None else sum_.add_(dense)

    def waiting(self) -> list[FlatBucket]:
        """Return the buckets with unreduced gradients on any rank, in launch order. Collective."""
        order = list(reversed(self._geometry.buckets))
        has = [any(index in self.sums for index in bucket.params) for bucket in order]
        wanted = torch.tensor(has, dtype=torch.int32)
        self._comms.data.all_reduce(wanted, op="max", name="buckets with gradients that came again")
        return [bucket for bucket, some in zip(order, wanted.tolist(), strict=True) if some]

    @torch.no_grad()
    def reduce(self, buckets: Sequence[FlatBucket], value_of: Callable[[int], torch.Tensor | None]) -> None:
        """Add the ranks' average of ``value_of(index)``, fp32, to the accumulators of ``buckets``. Collective."""
        for bucket in buckets:
            comms = self._comms.of(bucket)
            most = max(each.count for each in buckets if self._comms.of(each) is comms)
            if id(comms) not in self._slots or self._slots[id(comms)].numel() < most:
                self._slots[id(comms)] = comms.shard.empty(most, torch.float32)
            slot = self._slots[id(comms)][: bucket.count].zero_()
            for index in bucket.params:
                value = value_of(index)
                if value is not None:
                    self._geometry.view(slot, index).copy_(value)
            sum_, name = torch.empty(bucket.held_count), f"rest of gradients of bucket {bucket.index}"
            if comms.hops:
                comms.shard.reduce_scatter([slot], out=[sum_], name=name, order="rank")
                sum_ = AcrossGroups(comms, [bucket], 0).mean(bucket, sum_, name)
            else:
                comms.shard.reduce_scatter([slot], "avg", out=[sum_], name=name)
            shard = self._accumulators.shard(bucket, change=True)
            shard.add_(sum_.to(shard.device))

    def clear(self) -> None:
        self.sums.clear()

    def close(self) -> None:
        self.sums.clear()
        self._slots.clear()
