"""Hints in messages: the known word that is nearest to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


def did_you_mean(word: object, known: Iterable[str], also: Mapping[str, str] | None = None) -> str:
    """Return "; did you mean 'x'?" for the nearest of ``known``, or "" where none is near.

    also: words of other libraries, and what they are called here.
    """
    names, text = list(known), str(word)
    near = (also or {}).get(text.lower())
    if near is None:
        by_lower = {name.lower(): name for name in names}
        found = difflib.get_close_matches(text.lower(), by_lower, n=1, cutoff=0.65)
        near = by_lower[found[0]] if found else None
    return f"; did you mean {near!r}?" if near else ""
