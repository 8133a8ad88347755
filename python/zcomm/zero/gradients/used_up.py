"""Gradients in a world of one that updates use up in their host slots, while backward runs.

[Note: gradients that are used up] The lane's ``d2h`` stream copies a bucket from its device slot into a page-locked
host slot of the same dtype. The update of that bucket (schedule/from_slots.py) reads it there, and frees the slot. So
host memory has a bounded ring of slots (HOST_SLOTS_NBYTES), and neither sums nor all gradients. Backward waits for the
update of the slot's last bucket if all slots are full.
Nothing else can read or change a gradient: ``open`` raises.
Thread rule: as DeviceSlots; ``land`` and ``has_landed`` on the thread of the update.
"""

from __future__ import annotations

import torch

from zcomm.zero.gradients.pinned import D2HPath, D2HTransport
from zcomm.zero.gradients.transport import Nbytes
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.update_hooks import UpdateHooks
from zcomm.zero.worker import Pollable


class UsedUpTransport(D2HTransport):
    """Transport of buckets that leave the device, each to its update. updates: ``on_sum`` uses a slot up.

    Memory: slots on the host, as D2HTransport has them.
    """

    def __init__(self, path: D2HPath, updates: UpdateHooks) -> None:
        assert path.plan.comm.world_size == 1
        super().__init__(path, sums={})
        self._updates = updates
        self._uses: list[Pollable | None] = [None] * len(self.slots.memory)

    def start(self, bucket: FlatBucket, accumulate: bool) -> None:
        assert not accumulate
        self.copy_down(bucket)
        number = self.slots.number[bucket.index]
        self._holder[number] = bucket.index
        self._uses[number] = self._updates.on_sum(bucket.index, self.slot(bucket))

    def has_landed(self, bucket: FlatBucket) -> bool:
        """Return True if the bucket's gradient is on the host."""
        return bool(self._copied[self.slots.number[bucket.index]].done())

    def land(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the bucket's gradient, when it is on the host, in the dtype of the slots."""
        self._lane.wait(self._copied[self.slots.number[bucket.index]])
        return self.slot(bucket)

    def wait(self, number: int) -> None:
        """Wait until the gradient in slot ``number`` has been used up."""
        use = self._uses[number]
        if use is not None:
            use.wait()
            self._uses[number] = None

    def open(self, bucket: FlatBucket, change: bool = False) -> torch.Tensor:
        raise RuntimeError("the sum of a gradient: backward uses it up")

    def fill(self) -> None:
        """Do nothing: there are no sums. ``open`` raises for readers of zeros."""

    @property
    def nbytes(self) -> list[Nbytes]:
        return [(self.tier, "slots", self.slots.nbytes)]
