"""``deepspeed.profiling``: the modules of it that programs import."""

from __future__ import annotations

from zcomm.compat.deepspeed.lazy import names_of

__getattr__ = names_of(__name__)
