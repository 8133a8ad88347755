"""ZeRO: optimizer state, gradients and parameters sharded over ranks, swapped over tiers."""

from __future__ import annotations

from zcomm.zero.checkpoint.state_pieces import StatePiece
from zcomm.zero.loss_scale import LossScale
from zcomm.zero.materialize.init import Init
from zcomm.zero.memory.limit import MemoryLimit
from zcomm.zero.memory.usage import memory_formula
from zcomm.zero.optimizer import ZeroOptimizer
from zcomm.zero.options import Offload, Precision, Units
from zcomm.zero.poison import StepUndoneError
from zcomm.zero.tensors.full_tensor import (
    full_grad,
    full_optim_state,
    full_param,
    set_full_grad,
    set_full_optim_state,
    set_full_param,
)
from zcomm.zero.tensors.gathered import GatheredParameters
from zcomm.zero.tensors.load import load_weights

__all__ = [
    "GatheredParameters",
    "Init",
    "LossScale",
    "MemoryLimit",
    "Offload",
    "Precision",
    "StatePiece",
    "StepUndoneError",
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
