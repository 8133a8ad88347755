"""Makes "zcomm" known to torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from zcomm.torch_backend import completer, replaced
from zcomm.torch_backend.device import DeviceProcessGroup
from zcomm.torch_backend.eager import run_eagerly
from zcomm.torch_backend.group import ProcessGroup
from zcomm.torch_backend.options import NAME, timeout_with


def _create(options: Any, backend_options: Any) -> ProcessGroup:
    kind = DeviceProcessGroup if torch.cuda.is_available() else ProcessGroup
    timeout = timeout_with(backend_options, options.timeout)
    return kind(options.store, options.group_rank, options.group_size, timeout, options.global_ranks_in_group)


def register() -> None:
    """Register the backend, once per process. Newer torch calls it by the package's entry point."""
    if hasattr(dist.Backend, NAME.upper()):
        return
    devices = ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=devices)
    replaced.install()
    completer.install()
    run_eagerly()
