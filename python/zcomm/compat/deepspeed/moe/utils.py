"""``deepspeed.moe.utils``: refused when used."""

from __future__ import annotations

from zcomm.compat.deepspeed.moe import refuse

split_params_into_different_moe_groups_for_optimizer = refuse("split_params_into_different_moe_groups_for_optimizer")
