"""``deepspeed.constants``: the port and the time in which ranks join."""

from __future__ import annotations

from datetime import timedelta

TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=10)
