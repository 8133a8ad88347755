"""Known faults, by patterns of "WORLD:SETTING"; the tests name entries that are no longer true."""

from __future__ import annotations

KNOWN: dict[str, set[str]] = {}
