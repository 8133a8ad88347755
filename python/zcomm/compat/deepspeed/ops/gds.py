"""``deepspeed.ops.gds``: its builder, as that of ``deepspeed.ops.op_builder``. Its handle is refused."""

from __future__ import annotations

from zcomm.compat.deepspeed.lazy import names_of

__getattr__ = names_of(__name__, {".ops.op_builder": "GDSBuilder"})
