"""UnitChoice: the modules and parameters of one unit, before memory is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn


@dataclass
class UnitChoice:
    """The choice of one unit.

    ``modules``: their forward needs the unit; ``params`` in order of registration. keep: see Units. is_part:
    ``Units(max_bytes=)`` has made it of a part of a block, or of the root. uses: modules that need it one by one, as an
    embedding and the head that it is tied to. by_rows: of one weight, gathered in blocks of rows by the operations
    that use it (rows/ops.py).
    """

    name: str
    modules: list[nn.Module]
    params: list[nn.Parameter] = field(default_factory=list)
    keep: bool = False
    is_part: bool = False
    uses: int = 1
    by_rows: bool = False


def nbytes_of(params: Iterable[nn.Parameter], itemsize: int | None) -> int:
    """Return the bytes of parameters with ``itemsize`` bytes per element; None: as they are."""
    return sum(param.numel() * (itemsize or param.itemsize) for param in params)
