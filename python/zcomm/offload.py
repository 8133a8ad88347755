"""Public names of the memory tiers: page-locked host memory and swap files on NVMe (zcomm.memory)."""

from __future__ import annotations

from zcomm.memory.pinned import PinnedArena, pinned_empty
from zcomm.memory.swap_file import SwapFile, finished

__all__ = ["PinnedArena", "SwapFile", "finished", "pinned_empty"]
