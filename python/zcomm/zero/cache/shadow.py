"""ShadowKeys: two places on the drive for each key; one of them has the valid data ([Note: transaction]).

[Note: transaction] ``Offload(atomic=True)``. A transaction writes a key to the place that is not valid, and then reads
it there. ``commit`` makes these places valid, ``roll_back`` forgets them. Both only change memory: no byte moves. All
places are reserved at construction, so that a full drive raises before training.
Thread rule: ``begin``, ``commit`` and ``roll_back`` while nothing is in flight; the rest on any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_SECOND = " (2)"  # ends the name of a second place


@dataclass(frozen=True)
class _Now:
    """The valid places. second: keys with a valid second place. changed: keys written in the transaction."""

    second: frozenset[str] = frozenset()
    changed: set[str] = field(default_factory=set)
    open: bool = False
    count: int = 0


class ShadowKeys:
    """The places of an optimizer's keys, and its transaction."""

    def __init__(self) -> None:
        self._nbytes: dict[str, int] = {}  # of a place, by key
        self._now = _Now()  # replaced as a whole: an interrupt finds the old or the new one

    def add(self, key: str, nbytes: int) -> str:
        """Add a second place for ``key``; return its name."""
        self._nbytes[key] = nbytes
        return key + _SECOND

    @property
    def open(self) -> bool:
        """True if a transaction has begun and not ended."""
        return self._now.open

    @property
    def count(self) -> int:
        """Number of transactions that were committed."""
        return self._now.count

    def place(self, key: str) -> str:
        """Return the name of the place that ``key`` is read from."""
        now = self._now
        return key + _SECOND if (key in now.second) != (key in now.changed) else key

    def write_key(self, key: str) -> str:
        """Return the name of the place that ``key`` is written to."""
        now = self._now
        if now.open and key in self._nbytes:
            now.changed.add(key)
        return self.place(key)

    def counting(self, places: Iterable[str]) -> dict[str, str]:
        """Return the ``places`` that are read, by key."""
        keys = {place.removesuffix(_SECOND): None for place in places}  # in their order
        held = set(places)
        return {key: place for key in keys if (place := self.place(key)) in held}

    def begin(self) -> None:
        now = self._now
        self._now = _Now(now.second, set(), True, now.count)

    def commit(self) -> None:
        now = self._now
        self._now = _Now(now.second ^ now.changed, set(), False, now.count + 1)

    def written(self) -> dict[str, int]:
        """Return the places that the transaction has written, with their bytes."""
        return {self.place(key): self._nbytes[key] for key in self._now.changed}

    def roll_back(self) -> None:
        now = self._now
        self._now = _Now(now.second, set(), False, now.count)

    def forget(self) -> None:
        """Count from the beginning: all ranks have loaded a checkpoint."""
        self._now = _Now(self._now.second)
