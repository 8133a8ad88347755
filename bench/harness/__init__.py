"""Parts that all benches share: ranks, timing in turn, records, goals, the device, and installed peers."""

from __future__ import annotations
