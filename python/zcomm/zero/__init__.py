"""ZeRO: optimizer state, gradients and parameters sharded over ranks, swapped over tiers."""

from __future__ import annotations

from zcomm.zero.memory import memory_formula
from zcomm.zero.optimizer import ZeroOptimizer
from zcomm.zero.options import Offload

__all__ = ["Offload", "ZeroOptimizer", "memory_formula"]
