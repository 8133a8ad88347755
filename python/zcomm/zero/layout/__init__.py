"""Layout: which parameter lies where in flat buckets, sections, tiles and units. Pure arithmetic."""

from __future__ import annotations
