"""The parameters of all ranks' stores, of which this rank may have all, a part or nothing.

[Note: whole names] A checkpoint has each name once, with the whole tensor, for any mesh. So it loads with any other
mesh, and exports as the checkpoint of one rank. Ranks along "tensor" have parts of a tensor, or copies. Ranks along
other axes may have other names. Each part is given by the first group of ranks that has it.
Collective if ranks have different tensors; otherwise nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zcomm.zero.layout.cut import Cut
from zcomm.zero.parts import Parts


@dataclass(frozen=True)
class Row:
    """A parameter of the store of some rank. cut: the part of this rank. index: the number of the parameter, of which
    this rank gives its elements; None: it gives none."""

    name: str
    frozen: bool
    cut: Cut
    index: int | None

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.cut.shape


def rows_of(parts: Parts) -> list[Row]:
    """List the parameters of all ranks' stores, the same on all ranks. Collective.

    Raises: RuntimeError on all ranks for a name with several forms, or without some of its parts.
    """
    frozen = [parts.geometry.is_frozen(index) for index in range(len(parts.names))]
    own: list[list[Any]] = [
        [name, kind, list(cut.shape), cut.dim, cut.blocks, cut.count, cut.index]
        for name, kind, cut in zip(parts.names, frozen, parts.cuts, strict=True)
    ]
    told = parts.comms.told(own, "names of parameters")
    if len(told) == 1:
        return [Row(name, frozen[index], parts.cuts[index], index) for index, name in enumerate(parts.names)]
    firsts = parts.comms.first_of
    forms: dict[str, list[Any]] = {}
    givers: dict[tuple[str, int], int] = {}  # the first rank of the group that gives a part
    for rank, rows in enumerate(told):
        for name, *form, number in rows:
            if forms.setdefault(name, form) != form:
                raise RuntimeError(f"{name} is {form} (frozen, shape, ...) on rank {rank}, but {forms[name]} elsewhere")
            givers[name, number] = min(givers.get((name, number), firsts[rank]), firsts[rank])
    for name, (*_, count) in forms.items():
        missing = [str(number) for number in range(count) if (name, number) not in givers]
        if missing:
            raise RuntimeError(f"no rank has part {', '.join(missing)} of {count} of {name}")
    here, mine = {name: index for index, name in enumerate(parts.names)}, firsts[parts.comm.rank]
    found = []
    for name, (kind, shape, dim, blocks, count) in forms.items():
        index = here.get(name)
        cut = Cut(torch.Size(shape), dim, 0, count, blocks) if index is None else parts.cuts[index]
        gives = index is not None and givers[name, cut.index] == mine
        found.append(Row(name, kind, cut, index if gives else None))
    return found
