"""A unit of stage 3 and the state of its memory; see [Note: unit life] in life.py.

Thread rule: fields are the main thread's; ``gathering`` is the future of a call on the gathering thread.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.units.slot import Slot
from zcomm.zero.worker import Call


class UnitState(enum.Enum):
    """The state of a unit's memory."""

    SHARDED = "this rank's shard in the source; parameters have no memory"
    GATHERING = "a slot that is being filled; parameters have no memory"
    GATHERED = "a slot behind the unit's addresses; parameters may be whole"


class Unit:
    """A unit: its buckets, its addresses, its state and its current uses."""

    def __init__(self, index: int, choice: UnitChoice, buckets: Sequence[FlatBucket], nbytes: int) -> None:
        self.index = index
        self.name = choice.name
        self.keep = choice.keep or index == 0
        self.is_part = choice.is_part
        self.by_rows = choice.by_rows  # never whole, always SHARDED
        self.is_shared = choice.uses > 1  # by several modules
        self.in_ring = not self.keep and not self.by_rows
        self.buckets = buckets
        self.nbytes = nbytes
        self.offset = 0  # in the range of addresses
        self.state = UnitState.SHARDED
        self.slot = -1
        self.own: Slot | None = None  # of a resident unit
        self.last_use = 0
        self.in_forward = 0
        self.in_backward = False
        self.attached = False  # whether the parameters are views of its memory
        self.plain = False  # whether the parameters are ordinary ones
        self.parted = False  # plain, except for some parameters
        self.edits = 0  # changes of weights by the program when its gather was submitted
        self.stamp = (0, 0)  # of the weights when its gather was submitted: see WeightBases
        self.rewrites = 0  # of this unit, by the program: see WeightBases
        self.stale = False  # whether the program changed a weight after the gather
        self.surrounds = False  # whether another unit ran inside its forward
        self.gathering: Call[None] | None = None
        self.reader = ""  # name of the call that gathers it, unless that is a forward or backward
        self.gather_name = ""  # of the last submitted gather, because ``reader`` may change while it is pending
        self.asked = False  # whether all of its GATHERING has been submitted (on a device)
        self.views: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.span = (0, 0)  # the addresses of its views

    def bucket_begins(self) -> Iterator[tuple[FlatBucket, int]]:
        """Yield the unit's buckets and their begins in its memory (elements)."""
        begin = 0
        for bucket in self.buckets:
            yield bucket, begin
            begin += bucket.count

    @property
    def idle(self) -> bool:
        return not self.in_forward and not self.in_backward
