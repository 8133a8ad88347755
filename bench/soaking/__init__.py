"""Parts of bench/soak: episodes drawn from seeds, worlds of processes that play them, and growth."""

from __future__ import annotations
