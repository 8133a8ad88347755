"""MeshLayout: the ranks of a job as a box with named axes, and the groups of ranks along its axes.

A place of the box is a tuple of coordinates, one for each axis. Places are numbered row by row: the last axis changes
fastest. Invariants: each rank is at one place; every group along the same axes has the same size; groups of different
axes meet in one rank. Pure arithmetic: no communication.
Source: DeviceMesh of PyTorch; the grids of Megatron-LM (arXiv:2104.04473, section 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zcomm.hints import did_you_mean

# Other names of an axis, in meshes that other libraries make.
ALIASES = {
    "dp_shard": "shard",
    "fsdp": "shard",
    "dp_replicate": "replicate",
    "dp": "data",
    "data_parallel": "data",
    "tp": "tensor",
    "sp": "sequence",
    "cp": "sequence",
    "sequence_parallel": "sequence",
    "pp": "pipe",
    "ep": "expert",
}


@dataclass(frozen=True)
class MeshLayout:
    """Ranks by place, for axes (outermost first) and their sizes."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @staticmethod
    def of(axes: Sequence[str], shape: Sequence[int], ranks: Sequence[int]) -> MeshLayout:
        """Check and create a layout; aliases of axes are replaced by their names.

        ranks: by place. Raises: ValueError naming an axis, a size, or the ranks that do not fill the box.
        """
        names = tuple(_named(axes))
        for axis, size in zip(names, shape, strict=True):
            _check_size(axis, size)
        count = math.prod(shape)
        if count != len(ranks):
            raise ValueError(f"{_text(names, shape)} has places for {count}, but the world has {len(ranks)} rank(s)")
        if sorted(ranks) != list(range(len(ranks))):
            raise ValueError(
                f"{_text(names, shape)} has ranks {_some(ranks)}: expected each of 0 to {len(ranks) - 1} once"
            )
        return MeshLayout(names, tuple(shape), tuple(ranks))

    def describe(self) -> str:
        """Return the axes and sizes as one text, with the ranks if they are not in order."""
        text = _text(self.axes, self.shape)
        return text if self.ranks == tuple(range(len(self.ranks))) else f"{text} of ranks {_some(self.ranks)}"

    def chosen(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Return these axes, by their names and in the order of the box. Raises: ValueError."""
        names = tuple(_named(axes))
        for given, name in zip(axes, names, strict=True):
            if name not in self.axes:
                hint = did_you_mean(given, self.axes)
                raise ValueError(f"axis={given!r} is not one of {', '.join(self.axes)}{hint}")
        return tuple(axis for axis in self.axes if axis in names)

    def size(self, *axes: str) -> int:
        """Return the number of ranks in a group along these axes."""
        chosen = self.chosen(axes)
        return math.prod(size for axis, size in zip(self.axes, self.shape, strict=True) if axis in chosen)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of a rank."""
        return self._coordinates[rank]

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups along these axes, by place: ranks with equal coordinates on the other axes.

        Groups are in the order of these other coordinates. Without axes each rank is a group.
        """
        fixed = [number for number, axis in enumerate(self.axes) if axis not in self.chosen(axes)]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in self.ranks:
            coordinate = self._coordinates[rank]
            found.setdefault(tuple(coordinate[number] for number in fixed), []).append(rank)
        return tuple(tuple(group) for group in found.values())

    def factor(self, axis: str, sizes: Mapping[str, int]) -> MeshLayout:
        """Replace an axis by several, outermost first; their sizes multiply to its own. Raises: ValueError."""
        (old,) = self.chosen((axis,))
        number = self.axes.index(old)
        names = tuple(_named(tuple(sizes)))
        for name, size in zip(names, sizes.values(), strict=True):
            _check_size(name, size)
        if math.prod(sizes.values()) != self.shape[number]:
            raise ValueError(
                f"factor: {_text(names, tuple(sizes.values()))} does not multiply to {old}={self.shape[number]}"
            )
        axes = (*self.axes[:number], *names, *self.axes[number + 1 :])
        shape = (*self.shape[:number], *sizes.values(), *self.shape[number + 1 :])
        return MeshLayout.of(axes, shape, self.ranks)

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        found = {}
        for place, rank in enumerate(self.ranks):
            coordinate = []
            for size in reversed(self.shape):
                place, own = divmod(place, size)
                coordinate.append(own)
            found[rank] = tuple(reversed(coordinate))
        return found


def _named(axes: Sequence[str]) -> list[str]:
    """Return the names of axes without aliases. Raises: ValueError for one that is no word or comes twice."""
    names: list[str] = []
    for axis in axes:
        if not isinstance(axis, str) or not axis.isidentifier():
            raise ValueError(f"axis={axis!r}: expected a name, such as 'data'")
        name = ALIASES.get(axis, axis)
        if name in names:
            other = axes[names.index(name)]
            also = f" ({axis!r} and {other!r} mean the same)" if axis != other else ""
            raise ValueError(f"axis={name!r} comes twice{also}")
        names.append(name)
    return names


def _check_size(axis: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"{axis}={size!r}: expected a number of ranks, 1 or more")


def _text(axes: Sequence[str], shape: Sequence[int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in zip(axes, shape, strict=True)) or "a mesh without axes"


def _some(ranks: Sequence[int]) -> str:
    """Return ranks as a text of bounded length."""
    shown = ", ".join(map(str, ranks[:24]))
    return f"{shown}, ..." if len(ranks) > 24 else shown
