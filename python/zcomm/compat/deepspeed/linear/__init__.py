"""``deepspeed.linear``: frozen linear layers, quantised or not, with low-rank adapters that train."""

from __future__ import annotations

from zcomm.compat.deepspeed.modules import names_of, path_entry

__path__.append(path_entry(__name__))
__getattr__ = names_of(__name__)
