"""Parts that all benches share: ranks, timing in turn, records, goals, the device, and what else is installed."""

from __future__ import annotations
