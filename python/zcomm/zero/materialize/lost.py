"""Parameters that a construction has taken values from and, ending in an error, has not given back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zcomm.zero.materialize.closed import closed_value

_WHY = "_zcomm_lost"


def mark_lost(params: Sequence[torch.Tensor], shapes: Sequence[torch.Size], *ended: Any) -> None:
    """Mark those of ``params``, of these shapes, that have no values now. ended: as of ``__exit__``: by which error."""
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
    return param.shape != shape or hasattr(param, "_zcomm_keeper")  # of a stand-in: its store is gone
