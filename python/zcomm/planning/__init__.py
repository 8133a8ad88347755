"""Planning: what a model costs in each stage, tier and world, before anything is started (``zcomm plan``)."""

from __future__ import annotations

from zcomm.planning.activations import saved_nbytes
from zcomm.planning.estimate import Estimate, estimate

__all__ = ["Estimate", "estimate", "saved_nbytes"]
