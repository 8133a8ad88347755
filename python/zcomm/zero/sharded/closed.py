"""Values that a closed optimizer left to the next one, and parameters that have lost their values.

ClosedShards are this rank's shards of a closed optimizer's parameters, until another optimizer takes over the
parameters. No rank has the whole values, and ``close()`` waits for no other rank. So each rank keeps its own shard, and
the next construction, which is collective, reads the values from all of them.
Memory: the shards, freed with the last parameter that has elements in them.
Thread rule: the main thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.flat import Geometry

_WHY = "_zcomm_lost"
Groups = tuple[tuple[int, ...], ...]


class ClosedShards:
    """The shards by bucket. age: equal on ranks that closed after the same steps and changes. groups: all
    shard groups of the job, by rank."""

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, shards: dict[int, torch.Tensor], age: str, groups: Groups
    ) -> None:
        self._geometry, self._dtype, self._shards, self.age, self.groups = geometry, dtype, shards, age, groups
        self._needed = {bucket.index: set(bucket.params) for bucket in geometry.every}

    def value(self, number: int) -> ClosedValue | None:
        """Return the value of parameter ``number``; None after ``drop``."""
        spans = self._geometry.spans(number)
        return ClosedValue(self, number) if all(number in self._needed[span.bucket] for span in spans) else None

    def drop(self, number: int) -> None:
        """Drop the parameter's value; free shards that no other parameter needs."""
        for span in self._geometry.spans(number):
            self._needed[span.bucket].discard(number)
            if not self._needed[span.bucket]:
                self._shards.pop(span.bucket, None)

    def shape(self, number: int) -> torch.Size:
        return self._geometry.places[number].shape

    def read(self, comm: Communicator, number: int, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of a parameter. Collective over the shard group."""
        out = torch.empty(end - begin, dtype=self._dtype)
        for span in self._geometry.spans(number):
            bucket = self._geometry.every[span.bucket]
            low, high = max(begin, span.begin), min(end, span.begin + span.count)
            shift, size = span.offset - span.begin, bucket.shard_count
            while low < high:
                shard, inside = divmod(low + shift, size)
                stop = min(high, low + size - inside)
                piece = out[low - begin : stop - begin]
                if shard == bucket.own:
                    piece.copy_(self._shards[span.bucket][inside : inside + stop - low])
                comm.broadcast(piece, root=shard, name=f"value of {name}")
                low = stop
        return out


class ClosedValue:
    """The value of one parameter."""

    def __init__(self, shards: ClosedShards, number: int) -> None:
        self._shards, self._number, self.age, self.groups = shards, number, shards.age, shards.groups

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end). Collective over the shard group."""
        return self._shards.read(comm, self._number, name, begin, end)

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Collective over the shard group."""
        shape = self._shards.shape(self._number)
        return self.read(comm, name, 0, shape.numel()).view(shape)


# --- parameters of a closed optimizer ------------------------------------------------------------


def is_closed(param: torch.Tensor) -> bool:
    """Return True if ``param`` is a stand-in of a closed optimizer."""
    keeper: Any = getattr(type(param), "_zcomm_keeper", None)
    return keeper is not None and keeper.closed and keeper.has(param)


def closed_value(param: torch.Tensor) -> ClosedValue | None:
    """Return the value of ``param`` that the ranks have kept; None: no value, or ``param`` is no such stand-in."""
    if not is_closed(param):
        return None
    keeper: Any = getattr(type(param), "_zcomm_keeper")  # noqa: B009
    value: ClosedValue | None = keeper.kept(param)
    return value


def revive(param: torch.Tensor, value: torch.Tensor) -> None:
    """Make ``param``, a stand-in of a closed optimizer, an ordinary parameter with the data ``value``."""
    keeper: Any = getattr(type(param), "_zcomm_keeper")  # noqa: B009
    keeper.revive(param, value)


def describe_closed(param: torch.Tensor) -> str:
    """Return a text that is equal on ranks that can build one value of it; "" if ``param`` is no such stand-in."""
    if not is_closed(param):
        return ""
    value = closed_value(param)
    return ", of a closed ZeroOptimizer, " + ("without a value" if value is None else f"kept after {value.age}")


def check_values(named: Iterable[tuple[str, torch.Tensor]], groups: Groups) -> None:
    """Raise ValueError naming parameters of a closed optimizer that have no value, or are cut over other ``groups``."""
    named = list(named)
    for name, param in named:
        value = closed_value(param)
        if value is not None and value.groups != groups:
            raise ValueError(
                f"{name} is in shards of {len(value.groups[0])} ranks of a closed ZeroOptimizer, cut over ranks "
                f"{_some(value.groups)}, but the new one cuts over {_some(groups)}: use the same ranks, or load the "
                "weights"
            )
    lost = [name for name, param in named if is_closed(param) and closed_value(param) is None]
    if lost:
        raise ValueError(
            f"{format_names(lost)}: the ZeroOptimizer that had the weights was closed and could not keep them: free "
            "memory was short, or updates were left to be made; load weights (model.load_state_dict(...)), or build "
            "the model again"
        )


def _some(groups: Groups) -> str:
    shown = "; ".join(", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "") for group in groups[:4])
    return f"{shown}; ..." if len(groups) > 4 else shown


# --- parameters that lost their values to an interrupted construction ------------------------------------


def mark_lost(params: Sequence[torch.Tensor], shapes: Sequence[torch.Size], *ended: Any) -> None:
    """Mark the parameters of ``params``, of these shapes, that have no values. ended: arguments of ``__exit__``."""
    error = ended[1]
    lost = [param for param, shape in zip(params, shapes, strict=True) if _is_without_value(param, shape)]
    for param in lost:
        setattr(param, _WHY, f"{type(error).__name__}: {error}")
    if lost and hasattr(error, "add_note"):  # Python 3.11
        error.add_note("The model has lost weights to the construction that ended here: build the model again.")


def check_not_lost(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for a parameter that has lost its value."""
    for name, param in named:
        why = getattr(param, _WHY, None)
        if why is not None:
            raise ValueError(
                f"{name} has no value any more: an earlier ZeroOptimizer of this model ended half way in construction "
                f"({why}); build the model again"
            )


def _is_without_value(param: torch.Tensor, shape: torch.Size) -> bool:
    if closed_value(param) is not None:
        return False
    return param.shape != shape or hasattr(param, "_zcomm_keeper")  # a stand-in without a store
