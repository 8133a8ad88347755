"""Splitting a communicator: its ranks form parts by color, and each part joins as a job does, with its own secret.

A split is two collectives of the parent, which its guard compares like all others (with the split's name). The first
exchanges color and key of all ranks, the second their addresses. A part's key is derived from the parent's key
and fresh nonces of all ranks. So no other process can derive it, and no secret travels.
Invariant: a rank that cannot open its door still takes part in the exchange. So its part fails at once with the reason,
and the parent remains usable.
Thread rule: one split of a communicator is one call of its order (docs/collectives.md).
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from zcomm import _core
from zcomm.bootstrap.auth import derive_key
from zcomm.bootstrap.hosts import Hosts
from zcomm.bootstrap.join import Door, Group, Joined, Splittable, enter

_PLACE = struct.Struct("=?7xqq16s")  # takes part, color, key, nonce
_MOST_ADDRESS_NBYTES = 2048
_SHOWN = 16  # ranks of a part in the text of an error


def split(
    parent: Splittable,
    joined: Joined,
    color: int | None,
    key: int,
    name: str,
    also: Callable[[Sequence[int]], None] | None = None,
) -> Joined | None:
    """Join this rank's part of ``parent``, which was built from ``joined``; None without a color. Collective.

    also: called on all ranks with the parent's ranks of this rank's part, none without a color, before the part joins.
    """
    color = _checked(color, key)
    what = f"split '{name}'" if name else "split"
    mine = _PLACE.pack(color is not None, color or 0, key, secrets.token_bytes(16))
    places = [_PLACE.unpack(place) for place in _gather(parent, mine, _PLACE.size, what)]
    group = None if color is None else _part(parent.rank, joined, color, places, what)
    if also is not None:
        also(_members(color, places) if color is not None else ())

    door = None if group is None else Door(group, address=joined.address)
    try:
        deadline = time.monotonic() + joined.deadlines.timeout_s
        told = b"" if door is None else door.address.encode()
        answers = _gather(parent, told, _MOST_ADDRESS_NBYTES, f"{what}: addresses")
        if group is None or door is None:
            return None
        ranks = _members(color, places)
        in_job = _in_job(parent, joined, ranks)
        try:
            part = enter(group, door, [answers[rank].decode() for rank in ranks], deadline)
        except _core.PeerLost as error:
            error.group_rank, error.rank = error.rank, in_job[error.rank] if in_job else error.rank
            raise
        if in_job:
            for core in (part.core, part.messenger):
                if core is not None:
                    core.describe(f" [{what}: {places_text(in_job)}]", in_job)
        processes = tuple(joined.processes[rank] for rank in ranks) if joined.processes else ()
        return replace(part, processes=processes, places=in_job)
    finally:
        if door is not None:
            door.close()


def _checked(color: int | None, key: int) -> int | None:
    """Return the color, None for a negative one. Raises: ValueError before any collective."""
    for word, value in (("color", color), ("key", key)):
        if value is not None and not (isinstance(value, int) and -(2**63) <= value < 2**63):
            raise ValueError(f"split: {word}={value!r} is not a 64-bit integer")
    return None if color is None or color < 0 else int(color)


def _gather(parent: Splittable, mine: bytes, most_nbytes: int, name: str) -> list[bytes]:
    """Gather the bytes of all ranks, by rank: one all_gather of ``most_nbytes`` and a length each."""
    record = len(mine).to_bytes(4, "little") + mine.ljust(most_nbytes, b"\0")
    shard = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    gathered = torch.empty(len(record) * parent.world_size, dtype=torch.uint8)
    parent.all_gather(shard, out=gathered, name=name)
    rows = [bytes(row.tolist()) for row in gathered.view(parent.world_size, len(record))]
    return [row[4 : 4 + int.from_bytes(row[:4], "little")] for row in rows]


def _members(color: int | None, places: list[tuple[bool, int, int, bytes]]) -> list[int]:
    """Return the parent's ranks of this color, by key, then by rank."""
    ranks = [rank for rank, (takes_part, other, _, _) in enumerate(places) if takes_part and other == color]
    return sorted(ranks, key=lambda rank: (places[rank][2], rank))


def _in_job(parent: Splittable, joined: Joined, ranks: list[int]) -> tuple[int, ...]:
    """Return the ranks in the job of the parent's ``ranks``; empty if they have the same numbers in the same job."""
    if ranks == list(range(parent.world_size)):
        return joined.places
    return tuple(joined.places[rank] if joined.places else rank for rank in ranks)


def places_text(places: tuple[int, ...]) -> str:
    """Return the text of which ranks of the job the ranks of a part are, for the errors of its operations."""
    if len(places) == 1:
        return f"its only rank is rank {places[0]} of the job"
    more = ", ..." if len(places) > _SHOWN else ""
    here = ", ".join(str(rank) for rank in range(min(len(places), _SHOWN)))
    return f"its ranks {here}{more} are ranks {', '.join(map(str, places[:_SHOWN]))}{more} of the job"


def _part(rank: int, joined: Joined, color: int, places: list[tuple[bool, int, int, bytes]], what: str) -> Group:
    ranks = _members(color, places)
    hosts: Hosts = joined.hosts.of_ranks(ranks)
    nonces = b"".join(nonce for _, _, _, nonce in places)
    # A part of a hierarchical communicator may be uneven, so "auto" chooses its backend.
    requested = "auto" if joined.requested == "hierarchical" else joined.requested
    return Group(
        what=what,
        rank=ranks.index(rank),
        hosts=hosts,
        requested=requested,
        key=derive_key(joined.key, b"split", nonces, color.to_bytes(8, "big")),
        deadlines=joined.deadlines,
        settings=joined.settings,
    )
