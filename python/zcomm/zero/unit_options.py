"""Options of stage 3 by units: which modules are units, which of them stay whole, how far ahead they are gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

UnitLike = nn.Module | type[nn.Module] | str


@dataclass(frozen=True)
class Units:
    """How stage 3 by units gathers a model. No bit depends on it.

    blocks: None: the outermost repeated blocks (children of ModuleList and Sequential; see layout/unit_policy.py).
    Or modules, classes of modules, or names (of a class, or of a module in the model): the outermost of these are the
    units.
    min_mb: join neighbours of one list until a unit has this many MiB of parameters.
    keep: of the units those (as in ``blocks``; True: all) that stay whole from their first use in a step until
    ``step()``, in memory of their own, instead of giving it to others after forward.
    prefetch_mb: gather as many units ahead as have this many MiB; None: ``prefetch`` units, whatever their size.
    What is in no unit is in the root unit, which stays whole during a step.
    """

    blocks: Sequence[UnitLike] | None = None
    min_mb: float = 0.0
    keep: Sequence[UnitLike] | bool = ()
    prefetch_mb: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("min_mb", self.min_mb), ("prefetch_mb", self.prefetch_mb)):
            if not _is_size(value) and not (value is None and name == "prefetch_mb"):
                raise ValueError(f"Units: {name}={value!r} must be a number of MiB, at least 0")
        for name, given in (("blocks", self.blocks), ("keep", self.keep)):
            if (name, given) == ("blocks", None) or (name == "keep" and isinstance(given, bool)):
                continue
            if not _is_list(given):
                raise ValueError(f"Units: {name}={given!r} must be a list of modules, classes of modules, or names")
        if self.blocks is not None and not self.blocks:
            raise ValueError("Units: blocks=[] would leave all in the root unit; give modules, or None")

    @property
    def prefetch_nbytes(self) -> int | None:
        return None if self.prefetch_mb is None else int(self.prefetch_mb * 2**20)


def as_units(units: Units | Sequence[UnitLike] | None) -> Units:
    """A list means ``blocks``. Raises: ValueError."""
    if units is None or isinstance(units, Units):
        return units or Units()
    if not _is_list(units):
        raise ValueError(f"units={units!r} must be None, a list of modules, of their classes or names, or zero.Units")
    return Units(units)


def slot_count(nbytes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> int:
    """Slots that units of these sizes, in order, need for what runs, what ran before it and what is gathered ahead."""
    ahead = prefetch
    if prefetch_nbytes is not None:
        ahead = max((len(_fitting(nbytes[first:], prefetch_nbytes)) for first in range(len(nbytes))), default=0)
    return min(ahead + 2, len(nbytes))


def ahead_of(order: Sequence[int], sizes: Sequence[int], prefetch: int, prefetch_nbytes: int | None) -> Sequence[int]:
    """Those of ``order`` (what comes next) to gather now. sizes: of all units."""
    if prefetch_nbytes is None:
        return order[:prefetch]
    return order[: len(_fitting([sizes[unit] for unit in order[: len(sizes)]], prefetch_nbytes))]


def _fitting(nbytes: Sequence[int], limit: int) -> Sequence[int]:
    """As many from the first on as ``limit`` holds."""
    for count, size in enumerate(nbytes):
        limit -= size
        if limit < 0:
            return nbytes[:count]
    return nbytes


def _is_size(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_list(given: object) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(_is_unit, given))


def _is_unit(value: object) -> bool:
    return isinstance(value, (str, nn.Module)) or (isinstance(value, type) and issubclass(value, nn.Module))
