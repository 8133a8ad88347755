"""``deepspeed.zero``: zcomm.zero's names, DeepSpeed's further names, and the modules of runtime.zero."""

from __future__ import annotations

from typing import Any

from zcomm import zero as _zero
from zcomm.compat.deepspeed.runtime import zero as _runtime
from zcomm.compat.deepspeed.runtime.zero import (
    partition_parameters,  # noqa: F401  (gives parameters ds_id, ...)
)

__all__ = sorted({*_zero.__all__, *_runtime.__all__})


def __getattr__(name: str) -> Any:
    if name in _zero.__all__ and name != "Init":  # Init takes DeepSpeed's arguments here
        return getattr(_zero, name)
    return getattr(_runtime, name)
