"""DeepSpeed's activation checkpointing: torch's, with inputs in host memory where ``configure`` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from zcomm.config import load
from zcomm.memory.activations import offload_activations

_configured = False
_offload: offload_activations | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Take DeepSpeed's arguments; ``checkpoint_in_cpu``, or the configuration's ``cpu_checkpointing``, is what counts.

    Raises: NotImplementedError for mpu_ (there is one data-parallel group); ValueError from the configuration.
    """
    global _configured, _offload
    if mpu_ is not None:
        raise NotImplementedError("checkpointing.configure(mpu_=) is not supported: ranks form one data-parallel group")
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        checkpoint_in_cpu = load(deepspeed_config).activation_checkpointing.cpu_checkpointing
    reset()
    _configured = True
    _offload = offload_activations(min_nbytes=0) if checkpoint_in_cpu else None


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Give buffers back, and forget ``configure``."""
    global _configured, _offload
    if _offload is not None:
        _offload.close()
    _configured, _offload = False, None


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` without keeping what is inside for backward, which runs it again."""
    if _offload is None:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)
    with _offload:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)
