"""What bench/soak is made of: episodes drawn from seeds, worlds of processes that play them, and growth."""

from __future__ import annotations
