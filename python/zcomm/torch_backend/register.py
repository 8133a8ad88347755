"""Makes "zcomm" known to torch.distributed."""

from __future__ import annotations

import functools
import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from zcomm.torch_backend import completer
from zcomm.torch_backend.device import DeviceProcessGroup
from zcomm.torch_backend.eager import run_eagerly
from zcomm.torch_backend.group import NAME, ProcessGroup


def _create(options: Any, backend_options: Any) -> ProcessGroup:
    kind = DeviceProcessGroup if torch.cuda.is_available() else ProcessGroup
    return kind(options.store, options.group_rank, options.group_size, options.timeout, options.global_ranks_in_group)


def _serve_monitored_barrier() -> None:
    """Replace torch's monitored_barrier, which refuses every backend but Gloo by name; zcomm's groups have it."""
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        mine = group
        if group is None and dist.is_initialized():
            mine = dist.group.WORLD
        if not isinstance(mine, ProcessGroup):
            original(group, timeout, wait_all_ranks)
            return
        if timeout is not None and not isinstance(timeout, timedelta):
            warnings.warn(f"monitored_barrier: timeout={timeout} taken as seconds; pass a timedelta", stacklevel=2)
        mine.monitored_barrier(timeout, wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def register() -> None:
    """Register the backend, once per process."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    _serve_monitored_barrier()
    completer.install()
    run_eagerly()
