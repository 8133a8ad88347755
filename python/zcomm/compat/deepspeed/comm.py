"""``deepspeed.comm``: torch.distributed under DeepSpeed's name, on the group that init_distributed made.

Names that torch.distributed has are its own; another one is an AttributeError. Thread rule: as torch.distributed.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zcomm.comm import job
from zcomm.compat.deepspeed import init_distributed

__all__ = ["destroy_process_group", "get_local_rank", "init_distributed", "is_available"]


def is_available() -> bool:
    """Return True: the group is zcomm's own."""
    return True


def get_local_rank() -> int:
    """Return this rank's number on its host. Raises: RuntimeError before init_distributed."""
    return job.current().local_rank


def destroy_process_group(group: Any = None) -> None:
    """End ``group``, or the job's group together with ``zcomm.shutdown()``."""
    if dist.is_initialized():
        dist.destroy_process_group(group)
    if group is None:
        job.shutdown()


def __getattr__(name: str) -> Any:
    if name.startswith("__") or not hasattr(dist, name):
        raise AttributeError(f"zcomm.compat.deepspeed.comm has no {name!r}, and torch.distributed has none either")
    return getattr(dist, name)
