"""Casts of an engine's forward: torch.autocast around it (section ``torch_autocast``), inputs (``fp16.auto_cast``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree

from zcomm.config import Config

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of autocast's operations, or None if it is off."""
    section = config.torch_autocast
    if not section.enabled:
        return None
    return _DTYPES.get(section.dtype.removeprefix("torch."), torch.float16)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of one forward. It replaces an autocast of the program around the engine."""
    dtype = autocast_dtype(config)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def cast_inputs(config: Config, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments of a forward with floating-point tensors in fp16, if ``fp16.auto_cast`` asks.

    Tensors are found in lists, tuples and dicts.
    """
    if not (config.fp16.enabled and config.fp16.auto_cast):
        return args
    cast: tuple[Any, ...] = _pytree.tree_map(_half, args)
    return cast


def _half(value: Any) -> Any:
    return value.half() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
