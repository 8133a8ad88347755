"""Lists of names in messages."""

from __future__ import annotations

from collections.abc import Sequence

SHOWN = 8


def format_names(names: Sequence[str]) -> str:
    """Join the first names, and count the others."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
