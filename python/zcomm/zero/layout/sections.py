"""Sections: which parameters lie together, their ranks, and the tiers of their weights and optimizer state.

A section's parameters are of one unit and one placement, all trained or all frozen. They have one tier for their
weights and one for their state. Its buckets do, too. Trained sections come first, unit by unit. Frozen parameters
(floating ones of the model that need no gradient) have sections in stage 3. In other stages they do not change, and are
whole on each rank. Planning uses it, too: no memory, no ranks.

[Note: whole pages] O_DIRECT moves whole pages between a drive and memory that begins at a page. Other bytes are copied
through a bounce buffer. So the shards of weights on a drive are padded to pages: each begins and ends at a page, in a
unit's slot, too. The state's spans need no padding: their windows have room for the last page (optim_state/nvme.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zcomm.comm.bucket_layout import ALIGN
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.local_param import as_local, local_shape
from zcomm.zero.layout.placement import ParamGroupPlacement, Placements
from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.options import Offload, Units
from zcomm.zero.saved_names import names_by_id

PAGE_NBYTES = 4096  # O_DIRECT's unit on every drive we know


@dataclass(frozen=True)
class Section:
    """A section. state, weights: tiers."""

    unit: int
    trained: bool
    state: str
    weights: str
    placement: ParamGroupPlacement
    params: tuple[nn.Parameter, ...]


class Sections:
    """The sections that build_parts lays out.

    shared: the ranks share host memory. on_device: the model runs on a device that does not. by_unit: stage 3 with
    gathers. Otherwise all is one unit. itemsize: bytes per element in training (None: as they are). placements: of all
    trained and frozen parameters. apart: in sections of their own. names: by id(). Parameters are numbered in the order
    of ``params``; ``local``: see [Note: local parts].
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[nn.Parameter],
        frozen: Sequence[nn.Parameter],
        placements: Placements,
        stage: int,
        offload: Offload,
        shared: bool,
        units: Units | None = None,
        on_device: bool = False,
        itemsize: int | None = None,
        apart: Container[object] = (),
    ) -> None:
        names = names_of(model, trained)
        state = {id(param): offload.state_tier(names[id(param)], param) for param in trained}
        weights = {
            id(param): offload.param_tier(names[id(param)], param) if stage == 3 else "device"
            for param in (*trained, *frozen)
        }
        self.by_unit = stage == 3 and ("nvme" in weights.values() or not shared or on_device)
        ordered = _registered(model, trained)
        self.choices = [UnitChoice("all", [], [*ordered, *frozen])]
        if self.by_unit:
            self.choices = choose_units(model, _registered(model, [*trained, *frozen]), units, itemsize)
            if on_device:
                _check_rows(self.choices, weights)
        self.list: list[Section] = []
        ids = {id(param) for param in trained}
        for kind in (True, False):
            for unit, choice in enumerate(self.choices):
                dealt: dict[tuple[str, str, ParamGroupPlacement, int], list[nn.Parameter]] = {}
                for param in choice.params:
                    if (id(param) in ids) == kind:
                        alike = (state.get(id(param), "device"), weights[id(param)], placements[id(param)])
                        dealt.setdefault((*alike, id(param) if param in apart else 0), []).append(param)
                self.list += [Section(unit, kind, *alike[:3], tuple(params)) for alike, params in dealt.items()]
        self.params = [param for section in self.list for param in section.params]
        self.names = [names[id(param)] for param in self.params]
        self.local = [as_local(param) for param in self.params]  # this rank's parts of DTensors

    @property
    def uses_nvme(self) -> bool:
        return any("nvme" in (section.state, section.weights) for section in self.list)

    @property
    def trains_from_nvme(self) -> bool:
        """True if trained weights or optimizer state are on a drive."""
        return any(section.trained and "nvme" in (section.state, section.weights) for section in self.list)

    @property
    def row_shapes(self) -> list[torch.Size]:
        """Shapes of the weights that are gathered by rows."""
        return [choice.params[0].shape for choice in self.choices if choice.by_rows]

    def geometry(
        self,
        bucket_nbytes: int,
        itemsize: int,
        align: int = ALIGN,
        whole: Collection[int] = (),
    ) -> Geometry:
        """Lay the sections out. whole: by id(), parameters that are not laid out in blocks even if gathered by rows."""
        pages = math.lcm(align, PAGE_NBYTES // itemsize)  # [Note: whole pages]
        by_rows = [self.choices[section.unit].by_rows and id(section.params[0]) not in whole for section in self.list]
        return Geometry(
            [[local_shape(param) for param in section.params] for section in self.list],
            [section.placement for section in self.list],
            bucket_nbytes,
            itemsize,
            trained=sum(section.trained for section in self.list),
            units=[section.unit for section in self.list],
            unit_count=len(self.choices),
            align=align,
            shard_align=[pages if section.weights == "nvme" else align for section in self.list],
            in_blocks=[number for number, rows in enumerate(by_rows) if rows],
        )


def _check_rows(choices: Sequence[UnitChoice], weights: Mapping[int, str]) -> None:
    """Raise ValueError if weights stay on a device, and would be gathered by rows. weights: tiers, by id()."""
    stay = [choice.name for choice in choices if choice.by_rows and weights[id(choice.params[0])] == "device"]
    if stay:
        raise ValueError(
            f"Units: rows=True ({format_names(stay)}) needs weights in host memory or on a drive: give params='cpu' or "
            "'nvme', or raise max_bytes"
        )


class NoModel(nn.Module):
    """Null object: the model of an optimizer that was given parameters. It has none."""


def names_of(model: nn.Module, params: Sequence[nn.Parameter]) -> dict[int, str]:
    """Return by id() the names in the model's state dict, and numbers for parameters that the model does not have."""
    names = names_by_id(model)
    return names | {id(p): f"parameter.{index}" for index, p in enumerate(params) if id(p) not in names}


def frozen_of(
    model: nn.Module, trained: Sequence[torch.Tensor], owned_elsewhere: Collection[int] = ()
) -> list[nn.Parameter]:
    """Return the floating-point parameters that are not trained and need no gradient. If nothing is trained, those that
    need one are included. owned_elsewhere: by id(), parameters of other optimizers."""
    ids = {id(param) for param in trained} | set(owned_elsewhere)
    found = [p for p in model.parameters() if id(p) not in ids and p.is_floating_point()]
    return [p for p in found if not p.requires_grad or not trained]


def _registered(model: nn.Module, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return ``params`` in the order of the model, so that the flat index does not depend on the param groups."""
    if isinstance(model, NoModel):
        return list(params)
    wanted = {id(param) for param in params}
    ordered = [param for param in model.parameters() if id(param) in wanted]
    if len(ordered) != len(params):
        raise ValueError(f"{len(params) - len(ordered)} parameter(s) of the param groups are not the model's")
    return ordered
