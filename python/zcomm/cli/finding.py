"""One finding of `zcomm doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One checked thing. state: ok, note (works, but slower or unusual), fail. mend: the remedy."""

    state: str
    name: str
    value: str
    mend: str = ""
