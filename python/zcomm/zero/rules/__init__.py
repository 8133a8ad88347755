"""Update rules: the arithmetic of one optimizer on a flat shard."""

from __future__ import annotations
