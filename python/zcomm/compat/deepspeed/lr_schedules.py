"""``deepspeed.lr_schedules``: the schedules, as ``deepspeed.runtime.lr_schedules`` has them."""

from __future__ import annotations

from zcomm.compat.deepspeed.runtime.lr_schedules import *  # noqa: F403
