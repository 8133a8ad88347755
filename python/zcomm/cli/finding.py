"""What `zcomm doctor` says about one thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """state: ok, note (works, but slower or unusual), fail. mend: what to do about it."""

    state: str
    name: str
    value: str
    mend: str = ""
