"""``deepspeed.accelerator``: properties of the device, as training scripts read them.

The device is CUDA if torch and the core both have a working CUDA device, else the CPU. ``DS_ACCELERATOR=cpu`` (or
``cuda``) in the environment overrides this. The first call chooses.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from zcomm.compat.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zcomm.compat.deepspeed.accelerator.cpu_accelerator import CpuAccelerator
from zcomm.compat.deepspeed.accelerator.cuda_accelerator import CudaAccelerator
from zcomm.compat.deepspeed.modules import path_entry

__all__ = [
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
    "training_device",
]

__path__.append(path_entry(__name__))
_accelerator: DeepSpeedAccelerator | None = None


def get_accelerator() -> Any:
    """Return the accelerator of this process.

    Raises: ValueError, RuntimeError for a DS_ACCELERATOR that cannot be served.
    """
    global _accelerator
    if _accelerator is None:
        _accelerator = _choose()
    return _accelerator


def set_accelerator(accel_obj: Any) -> None:
    """Set the accelerator. Raises: TypeError if ``accel_obj`` is not a DeepSpeedAccelerator."""
    global _accelerator
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(f"set_accelerator() takes a DeepSpeedAccelerator, got {type(accel_obj).__name__}")
    _accelerator = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True if the accelerator is one that zcomm trains on: the CPU or CUDA."""
    return isinstance(get_accelerator(), (CpuAccelerator, CudaAccelerator))


def training_device() -> torch.device | None:
    """Return the device that ``initialize`` moves the model to; None: the model is not moved.

    Among CUDA devices the rank's number on its host chooses.
    """
    accelerator = get_accelerator()
    if not isinstance(accelerator, CudaAccelerator):
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % accelerator.device_count()
    accelerator.set_device(index)
    return torch.device("cuda", index)


def _choose() -> DeepSpeedAccelerator:
    asked = os.environ.get("DS_ACCELERATOR", "")
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"DS_ACCELERATOR={asked!r} is not available; use 'cpu' or 'cuda', or leave it out")
    if asked == "cpu":
        return CpuAccelerator()
    lacking = [name for name, there in (("torch", _torch_has_cuda()), ("zcomm's core", _core_has_cuda())) if not there]
    if asked == "cuda" and lacking:
        raise RuntimeError(f"DS_ACCELERATOR='cuda', but {' and '.join(lacking)} found no CUDA device; see zcomm doctor")
    return CpuAccelerator() if lacking else CudaAccelerator()


def _torch_has_cuda() -> bool:
    return torch.cuda.is_available()


def _core_has_cuda() -> bool:
    from zcomm import _core  # inside, so that the names can be imported without a built core

    return _core.cuda_available()
