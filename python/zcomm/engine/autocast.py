"""torch.autocast around an engine's forward, as the section ``torch_autocast`` of the configuration asks for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zcomm.config import Config

_DTYPES = {"bfloat16": torch.bfloat16, "bf16": torch.bfloat16}


def autocast_dtype(config: Config) -> torch.dtype | None:
    """Return the dtype of autocast's operations, or None where it is off."""
    section = config.torch_autocast
    if not section.enabled:
        return None
    return _DTYPES.get(section.dtype.removeprefix("torch."), torch.float16)


def autocast(config: Config, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of one forward. It replaces an autocast of the program around the engine."""
    dtype = autocast_dtype(config)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
