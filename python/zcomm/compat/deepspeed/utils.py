"""``deepspeed.utils``: whole tensors by parameter, under DeepSpeed's names (zcomm.zero's functions), and its logger.

All are collective, as there. ``safe_get_local_*`` is not here: shards are cut from flat buckets, so that a rank's part
of a parameter is another than DeepSpeed's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zcomm.zero import full_grad as safe_get_full_grad
from zcomm.zero import full_optim_state as safe_get_full_optimizer_state
from zcomm.zero import full_param as safe_get_full_fp32_param
from zcomm.zero import set_full_grad as safe_set_full_grad
from zcomm.zero import set_full_optim_state as safe_set_full_optimizer_state
from zcomm.zero import set_full_param as safe_set_full_fp32_param

__all__ = [
    "log_dist",
    "logger",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]

logger = logging.getLogger("zcomm")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on ``ranks`` (None, or -1 among them: on all)."""
    from zcomm import _job

    rank = _job.current().rank if _job.is_initialized() else 0
    if ranks is None or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)
