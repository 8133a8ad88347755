"""ZeRO: optimizer state, gradients and parameters sharded over ranks, swapped over tiers."""

from __future__ import annotations

from zcomm.zero.gathered import GatheredParameters
from zcomm.zero.init_context import Init
from zcomm.zero.loss_scale import LossScale
from zcomm.zero.memory import memory_formula
from zcomm.zero.optimizer import ZeroOptimizer
from zcomm.zero.options import Offload
from zcomm.zero.unit_options import Units
from zcomm.zero.weights import load_weights
from zcomm.zero.whole import (
    full_grad,
    full_optim_state,
    full_param,
    set_full_grad,
    set_full_optim_state,
    set_full_param,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "LossScale",
    "Offload",
    "Units",
    "ZeroOptimizer",
    "full_grad",
    "full_optim_state",
    "full_param",
    "load_weights",
    "memory_formula",
    "set_full_grad",
    "set_full_optim_state",
    "set_full_param",
]
