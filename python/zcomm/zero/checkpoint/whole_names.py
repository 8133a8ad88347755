"""Names of all ranks' tensors, of which this rank may have all, a part or nothing.

[Note: whole names] A checkpoint has each name once, with the whole tensor, for any mesh. So it loads with any other
mesh, and exports as the checkpoint of one rank. Ranks along "tensor" have parts of a tensor, or copies. Ranks along
other axes may have other names. Each part is given by the first group of ranks that has it, and each tensor outside the
store by the first rank.
Collective if ranks have different tensors; otherwise nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from zcomm.zero.agree import broadcast
from zcomm.zero.checkpoint.model_tensors import Named, model_tensors
from zcomm.zero.groups.mesh_comms import is_copy
from zcomm.zero.layout.cut import Cut
from zcomm.zero.layout.local_param import whole_of
from zcomm.zero.parts import Parts


@dataclass(frozen=True)
class Row:
    """A parameter of the store of some rank. group: its param group; None: it is frozen. cut: the part of this rank.
    index: the number of the parameter, of which this rank gives its elements; None: it gives none. here: its number on
    this rank; None: only other ranks have it. common: all ranks have it whole."""

    name: str
    group: int | None
    cut: Cut
    index: int | None
    here: int | None
    common: bool = True

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.cut.shape

    @property
    def frozen(self) -> bool:
        return self.group is None


def rows_of(parts: Parts) -> list[Row]:
    """List the parameters of all ranks' stores, the same on all ranks. Collective.

    Raises: RuntimeError on all ranks for a name with several forms, or without some of its parts.
    """
    groups = [None if parts.geometry.is_frozen(index) else parts.group_of[index] for index in range(len(parts.names))]
    own: list[list[Any]] = [
        [name, group, list(cut.shape), cut.dim, cut.blocks, cut.count, cut.index]
        for name, group, cut in zip(parts.names, groups, parts.cuts, strict=True)
    ]
    told = parts.comms.told(own, "names of parameters")
    if len(told) == 1:
        return [Row(name, groups[index], parts.cuts[index], index, index) for index, name in enumerate(parts.names)]
    firsts = parts.comms.first_of
    forms: dict[str, list[Any]] = {}
    ranks: dict[str, int] = {}  # that have the name
    givers: dict[tuple[str, int], int] = {}  # the first rank of the group that gives a part
    for rank, rows in enumerate(told):
        for name, *form, number in rows:
            if forms.setdefault(name, form) != form:
                raise RuntimeError(
                    f"{name} is {form} (param group, shape, ...) on rank {rank}, but {forms[name]} elsewhere"
                )
            ranks[name] = ranks.get(name, 0) + 1
            givers[name, number] = min(givers.get((name, number), firsts[rank]), firsts[rank])
    for name, (*_, count) in forms.items():
        missing = [str(number) for number in range(count) if (name, number) not in givers]
        if missing:
            raise RuntimeError(f"no rank has part {', '.join(missing)} of {count} of {name}")
    numbers, mine = {name: index for index, name in enumerate(parts.names)}, firsts[parts.comm.rank]
    found = []
    for name, (group, shape, dim, blocks, count) in forms.items():
        here = numbers.get(name)
        cut = Cut(torch.Size(shape), dim, 0, count, blocks) if here is None else parts.cuts[here]
        gives = here is not None and givers[name, cut.index] == mine
        common = count == 1 and ranks[name] == len(told)
        found.append(Row(name, group, cut, here if gives else None, here, common))
    return found


class Rest:
    """The model's tensors outside the store, on this rank: ``every`` is their names and whole values."""

    def __init__(self, parts: Parts, lean: bool = False) -> None:
        self.tensors = model_tensors(parts, lean)
        self.every: Named = [(name, whole_of(tensor)) for name, tensor in self.tensors.every]
        stored = ((name, parts.store.parameter(index)) for index, name in enumerate(parts.names))
        of_stage = [name for name, tensor in (*stored, *self.tensors.every) if not is_copy(tensor)]
        self._origins = dict.fromkeys(of_stage, parts.comms.stages[parts.comm.rank])

    @property
    def names(self) -> dict[str, dict[str, Any]]:
        """Their names, for ``names_of_all``. A value is the form, or the name of which an alias is another. origins:
        stages of tensors that are no copies."""
        return {
            "origins": self._origins,
            "rest": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in self.every},
            "aliases": self.tensors.aliases,
            "frozen": dict.fromkeys(self.tensors.frozen),
            "added": dict.fromkeys(name for name, _ in self.tensors.added),
        }


@dataclass(frozen=True)
class Held:
    """A name that ``ranks`` ranks have. first: the first of them. value: that rank's."""

    first: int
    value: Any
    ranks: int = 1


HeldNames = dict[str, dict[str, Held]]


def names_of_all(parts: Parts, own: Mapping[str, Mapping[str, Any]]) -> HeldNames:
    """Return the names of all ranks by kind. own: this rank's names and their values (JSON) by kind. Collective.

    Raises: RuntimeError, on all ranks, for an equal name of tensors in several pipeline stages.
    """
    found: HeldNames = {kind: {} for kind in own}
    told = parts.comms.told(own, "names of tensors")
    for rank, every in enumerate(told):
        for kind, names in every.items():
            for name, value in names.items():
                held = found[kind].get(name)
                if kind == "origins" and held is not None and held.value != value:
                    raise RuntimeError(
                        f"{name} is the name of two tensors, of stages {held.value} and {value} of a pipeline: name "
                        "the layers of a stage as the whole model does (zcomm.parallel.pipeline)"
                    )
                found[kind][name] = Held(rank, value) if held is None else replace(held, ranks=held.ranks + 1)
    return found


def of_all_ranks(parts: Parts, own: Named, rest: Mapping[str, Held]) -> Named:
    """Return the tensors outside the store that any rank has, on all ranks. own: this rank's. Collective."""
    if parts.comms.is_one_model:
        return own
    here, found = dict(own), []
    for name, held in rest.items():
        tensor = here.get(name)
        if held.ranks < parts.comm.world_size:
            dtype, shape = held.value
            sent = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            if tensor is not None and parts.comm.rank == held.first:
                sent.copy_(tensor)
            broadcast(parts.comm, sent, held.first, name)
            tensor = sent if tensor is None else tensor
        assert tensor is not None
        found.append((name, tensor))
    return found
