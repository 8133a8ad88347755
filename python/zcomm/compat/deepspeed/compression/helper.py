"""``deepspeed.compression.helper``: modules by their dotted names."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the module of a dotted name ("layers.0.attention"). Raises: AttributeError."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Put ``module`` in the place of a dotted name. Raises: AttributeError where the place's owner is not there."""
    owner, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, last, module)
