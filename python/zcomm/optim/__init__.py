"""Drop-ins for torch.optim, usable with no other part of zcomm: fused (docs/cpu_optimizers.md), and Lamb, Muon and
the 1-bit optimizers."""

from __future__ import annotations

from zcomm.optim.adam import CPUAdam
from zcomm.optim.fused_adam import FusedAdam
from zcomm.optim.lamb import Lamb
from zcomm.optim.muon import Muon
from zcomm.optim.one_array import CPUSGD, CPUAdagrad, CPULion
from zcomm.optim.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

__all__ = [
    "CPUSGD",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "FusedAdam",
    "Lamb",
    "Muon",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
]
