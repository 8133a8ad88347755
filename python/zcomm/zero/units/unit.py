"""A unit of stage 3, and what memory it has; see [Note: unit life] in life.py.

Thread rule: fields are the main thread's; ``gathering`` is the future of what the gathering thread does.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.layout.unit_choice import UnitChoice
from zcomm.zero.units.slot import Slot
from zcomm.zero.worker import Call


class UnitState(enum.Enum):
    """The memory that a unit has."""

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
        self.by_rows = choice.by_rows  # it is never whole, and always SHARDED
        self.is_shared = choice.uses > 1  # by several modules
        self.in_ring = not self.keep and not self.by_rows
        self.buckets = buckets
        self.nbytes = nbytes
        self.offset = 0  # in the range of addresses
        self.state = UnitState.SHARDED
        self.slot = -1
        self.own: Slot | None = None  # where it is kept
        self.last_use = 0
        self.in_forward = 0
        self.in_backward = False
        self.attached = False  # whether the parameters have its memory
        self.plain = False  # whether they are ordinary ones
        self.parted = False  # plain, but for some
        self.edits = 0  # changes of weights by the program when its gathering was asked for
        self.stale = False  # it was gathered before a weight was changed from outside
        self.surrounds = False  # another unit ran inside of its forward
        self.gathering: Call[None] | None = None
        self.reader = ""  # what gathers it, where that is not a forward or backward
        self.gather_name = ""  # of the gathering that was asked for last: ``reader`` changes while it is on its way
        self.asked = False  # whether all of it has been, since it is GATHERING (on a device)
        self.views: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.span = (0, 0)  # the addresses of its views

    def bucket_begins(self) -> Iterator[tuple[FlatBucket, int]]:
        """Yield the unit's buckets, and where each begins in its memory (elements)."""
        begin = 0
        for bucket in self.buckets:
            yield bucket, begin
            begin += bucket.count

    @property
    def idle(self) -> bool:
        return not self.in_forward and not self.in_backward
