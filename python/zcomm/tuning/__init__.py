"""Tuning: short runs of a program that choose a ZeRO stage and a micro batch size."""

from __future__ import annotations

from zcomm.tuning.search import Candidate, Limits, Outcome, search
from zcomm.tuning.tuner import Autotuner, Tuning

__all__ = ["Autotuner", "Candidate", "Limits", "Outcome", "Tuning", "search"]
