"""Integer parameters (quantised weights): nothing here shards or swaps them, so they stay whole on each rank."""

from __future__ import annotations

import logging

from torch import nn

from zcomm.zero.listed import listed


def integers_of(model: nn.Module | None) -> dict[str, nn.Parameter]:
    """By name."""
    every = model.named_parameters() if model is not None else ()
    return {name: param for name, param in every if not param.is_floating_point()}


def nbytes_of(model: nn.Module | None) -> int:
    return sum(param.nbytes for param in integers_of(model).values())


def say(model: nn.Module | None, stage: int, rank: int) -> None:
    """In stage 3, where one would think otherwise; once, on rank 0."""
    names = list(integers_of(model))
    if names and stage == 3 and rank == 0:
        logging.getLogger("zcomm").warning(
            "stage 3: %s, of integers, stay whole on each rank (%.1f MiB); only floating-point weights are sharded",
            listed(names),
            nbytes_of(model) / 2**20,
        )
