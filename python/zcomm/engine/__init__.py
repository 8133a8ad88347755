"""The engine: DeepSpeed's ``initialize`` and training loop over ZeroOptimizer."""

from __future__ import annotations

from zcomm.engine.build import initialize
from zcomm.engine.engine import Engine

__all__ = ["Engine", "initialize"]
