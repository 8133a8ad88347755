"""``deepspeed.module_inject``: the mode of tensor parallelism, and refused names."""

from __future__ import annotations

from zcomm.compat.deepspeed.module_inject.layers import set_autotp_mode
from zcomm.compat.deepspeed.modules import names_of, path_entry

__all__ = ["set_autotp_mode"]

__path__.append(path_entry(__name__))
__getattr__ = names_of(__name__)
