"""Names in messages."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 8


def listed(names: Sequence[str]) -> str:
    """The first ones, and how many there are more."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
