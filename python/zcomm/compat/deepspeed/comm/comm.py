"""``deepspeed.comm.comm``: the names of ``deepspeed.comm``."""

from __future__ import annotations

from typing import Any

from zcomm.compat.deepspeed import comm


def __getattr__(name: str) -> Any:
    return getattr(comm, name)
