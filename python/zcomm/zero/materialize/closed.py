"""Parameters of a closed optimizer: the values that it left to the next one, or none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm.zero.format_names import format_names
from zcomm.zero.units.closed import ClosedValue


def is_closed(param: torch.Tensor) -> bool:
    """Return True if ``param`` is a stand-in of a closed optimizer."""
    keeper: Any = getattr(type(param), "_zcomm_keeper", None)
    return keeper is not None and keeper.closed and keeper.has(param)


def closed_value(param: torch.Tensor) -> ClosedValue | None:
    """Return the value that the ranks have kept of ``param``; None: there is none, or ``param`` is no such stand-in."""
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
    """Return words that are equal on ranks that can build one value of it; "" if ``param`` is no such stand-in."""
    if not is_closed(param):
        return ""
    value = closed_value(param)
    return ", of a closed ZeroOptimizer, " + ("without a value" if value is None else f"kept after {value.age}")


def check_values(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError naming the parameters of a closed optimizer that have no value."""
    lost = [name for name, param in named if is_closed(param) and closed_value(param) is None]
    if lost:
        raise ValueError(
            f"{format_names(lost)}: the ZeroOptimizer that had the weights was closed and could not keep them: free "
            "memory was short, or updates were left to be made; load weights (model.load_state_dict(...)), or build "
            "the model again"
        )
