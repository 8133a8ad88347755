"""Which open ZeroOptimizer has a parameter."""

from __future__ import annotations

import torch

from zcomm.zero.assemble import Parts
from zcomm.zero.optimizer import ZeroOptimizer
from zcomm.zero.registry import open_optimizers
from zcomm.zero.units.stand_in import original


def owner_of(param: torch.Tensor) -> tuple[ZeroOptimizer, Parts, int | None] | None:
    """The optimizer, its parts and the parameter's number there; no number for one of its model that the store does not
    have: whole on each rank. None: no open optimizer knows it."""
    whole, param = None, original(param)
    for optimizer in open_optimizers():
        parts = optimizer._settled
        parts.attachment.put_back()
        index = parts.index_of.get(id(param))
        if index is not None:
            return optimizer, parts, index
        if whole is None and parts.model is not None and any(param is other for other in parts.model.parameters()):
            whole = (optimizer, parts, None)
    return whole
