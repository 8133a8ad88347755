"""Splitting a process group: its ranks meet over its own collectives, as the parts of a Communicator do.

The parent's store is not needed for that, and c10d's names of groups, which ranks may count differently, have no part
in it. Ranks of one part give the same list of ranks, in the order of the part. The color is a hash of the list, so
that ranks with different lists never join one part.
Thread rule: one split is one call of the parent's order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch._C._distributed_c10d import AllgatherOptions

from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.join import Joined
from zcomm.comm import split as communicators
from zcomm.torch_backend.ops.movements import Movements


class Parent:
    """A process group as zcomm.comm.split sees it (join.Splittable)."""

    def __init__(self, group: Movements) -> None:
        self._group = group
        self.rank = group._rank
        self.world_size = group._size

    def all_gather(self, shards: torch.Tensor, out: torch.Tensor, *, name: str) -> None:
        """Concatenate the shards of all ranks, in rank order."""
        starts = self._group._gathers([shards], [out], name)
        self._group._issue("split_group", AllgatherOptions(), [out], starts, keep=(shards, out)).wait()


def split(group: Movements, joined: Joined, ranks: Sequence[int], timeout_s: float) -> Joined | None:
    """Join the part of ``group`` that has these ranks, in this order; None on other ranks. Collective over ``group``.

    joined: the group's. timeout_s: the deadline of joining and of the part's operations. Raises: ValueError before any
    message for ranks that the group has not; ValueError if a rank of the part gave another list; as all_gather.
    """
    wrong = [rank for rank in ranks if not 0 <= rank < group._size]
    if wrong or not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(
            f"split_group: ranks={list(ranks)} of a group of {group._size}: expected different ranks from 0 to "
            f"{group._size - 1}, one at least"
        )
    is_member = group._rank in ranks
    place = ranks.index(group._rank) if is_member else 0
    as_parts = replace(joined, deadlines=Deadlines.exactly(timeout_s))
    part = communicators.split(Parent(group), as_parts, _color(ranks) if is_member else None, place, "split_group")
    if part is not None and part.core.world_size != len(ranks):
        part.core.close()
        for mesh in part.meshes:
            mesh.leave()
        raise ValueError(
            f"split_group: rank {group._rank} asks for a group of ranks {list(ranks)}, but only {part.core.world_size} "
            "of them gave this list; all ranks of the parent give the same lists"
        )
    return part


def _color(ranks: Sequence[int]) -> int:
    told = hashlib.sha256(",".join(map(str, ranks)).encode()).digest()
    return int.from_bytes(told[:8], "big") >> 1
