"""zcomm under the name ``deepspeed``; see zcomm/compat/deepspeed/alias.py."""

from __future__ import annotations

from zcomm.compat.deepspeed import alias

alias.serve()
