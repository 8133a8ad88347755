"""``deepspeed.moe.layer``: refused when used."""

from __future__ import annotations

from zcomm.compat.deepspeed.moe import refuse

MoE = refuse("MoE")
