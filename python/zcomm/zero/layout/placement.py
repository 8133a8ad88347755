"""Placement: the ranks that a parameter's gradients and optimizer state are divided among.

A side table by id(): nothing is set on parameters. Pure arithmetic: no communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Axes:
    """A group of ranks along axes of the job: ``size`` ranks, of which this one has number ``own``."""

    size: int
    own: int


@dataclass(frozen=True)
class ParamGroupPlacement:
    """The ranks of parameters that are sharded alike. state: gradients and optimizer state are cut over these.

    groups: shard groups that divide the state of one shard among them ([Note: hpZ]); 1: each group has all of it.
    first: this rank has the first of equal copies of its shard. duplicate: ranks along other axes have the same
    parameters, with equal gradients; counted: this rank has the first copy among those, too ([Note: groups]).
    experts: ranks along "expert" have other parameters ([Note: experts]).
    """

    state: Axes
    groups: int = 1
    first: bool = True
    duplicate: bool = False
    counted: bool = True
    experts: bool = False


Placements = Mapping[int, ParamGroupPlacement]  # by id() of the parameter


def over_all(params: Iterable[torch.Tensor], world_size: int, rank: int, groups: int = 1) -> Placements:
    """Return one placement for all ``params``: over all ranks of the job. groups: see ParamGroupPlacement."""
    return dict.fromkeys(map(id, params), ParamGroupPlacement(Axes(world_size, rank), groups))
