"""``deepspeed.accelerator``: properties of the device, as training scripts read them.

The device is CUDA if torch and the core both have a working CUDA device, else the CPU. ``DS_ACCELERATOR=cpu`` (or
``cuda``) in the environment overrides this. The first call chooses.
Source: DeepSpeed's accelerator interface.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from zcomm.compat.deepspeed.modules import names_of, path_entry

__all__ = [
    "DeepSpeedAccelerator",
    "get_accelerator",
    "is_current_accelerator_supported",
    "set_accelerator",
    "training_device",
]

__path__.append(path_entry(__name__))
__getattr__ = names_of(__name__)
_BUILDERS = "zcomm.compat.deepspeed.op_builder"


class DeepSpeedAccelerator:
    """A kind of device, with the answers that all kinds share.

    DeepSpeed's class of this name is abstract; programs ask isinstance() of it.
    """

    _name = ""
    _communication_backend_name = "zcomm"
    _compile_backend = "inductor"

    def communication_backend_name(self) -> str:
        """Register zcomm's backend, and return its name for ``torch.distributed.init_process_group``."""
        import zcomm.torch_backend  # noqa: F401

        return self._communication_backend_name

    def get_compile_backend(self) -> str:
        """Return the backend for ``torch.compile`` that the program has set."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Keep ``backend``. Raises: ValueError for one that torch does not list."""
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ValueError(f"set_compile_backend({backend!r}): torch.compile has {', '.join(known)}")
        self._compile_backend = backend

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call ``callback`` at once, because the device is already initialized."""
        return callback()

    def random(self) -> Any:
        """Return torch's module of generators."""
        return torch.random

    def is_fp16_supported(self) -> bool:
        return True

    def is_triton_supported(self) -> bool:
        return False

    def prefer_triton_grouped_mm(self) -> bool:
        return False

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is on a device of this kind."""
        return tensor.device.type == self._name

    def supported_dtypes(self) -> list[torch.dtype]:
        """Return the floating dtypes that models train in on this device."""
        return [torch.float, torch.half, torch.bfloat16]

    # --- pages that the device reads ------------------------------------------------------------------------------

    def pin_memory(self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
        """Return a pinned copy of ``tensor``."""
        return tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def unpin_memory(self, tensor: torch.Tensor) -> None:
        """Do nothing: pages are unpinned when ``tensor`` is freed."""

    # --- operations that DeepSpeed compiles -----------------------------------------------------------------------

    def op_builder_dir(self) -> str:
        """Return the package of the builders."""
        return "deepspeed.ops.op_builder"

    def create_op_builder(self, class_name: str) -> Any:
        """Return a builder by its class's name, None if there is none."""
        kind = self.get_op_builder(class_name)
        return None if kind is None else kind()

    def get_op_builder(self, class_name: str) -> Any:
        """Return the class of a builder, None if there is none."""
        return getattr(importlib.import_module(_BUILDERS), class_name, None)

    def build_extension(self) -> Any:
        """Return torch's command of setuptools that builds extensions."""
        from torch.utils.cpp_extension import BuildExtension

        return BuildExtension

    # --- environment of the ranks -----------------------------------------------------------------------------------

    def export_envs(self) -> list[str]:
        """Return the beginnings of variables that a launcher passes on to other hosts."""
        return []

    def visible_devices_envs(self) -> list[str]:
        """Return the variables that choose devices."""
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        """Set these variables in ``current_env``."""
        for variable in self.visible_devices_envs():
            current_env[variable] = ",".join(map(str, local_accelerator_ids))

    def device_name(self, device_index: int | None = None) -> str:
        """Return a name that ``tensor.to()`` takes."""
        return self._name if device_index is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))


# --- the accelerator of this process ----------------------------------------------------------------------------------

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
    return get_accelerator()._name in ("cpu", "cuda")


def training_device() -> torch.device | None:
    """Return the device that ``initialize`` moves the model to; None: the model is not moved.

    Among CUDA devices the rank's number on its host chooses.
    """
    accelerator = get_accelerator()
    if accelerator._name != "cuda":
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % accelerator.device_count()
    accelerator.set_device(index)
    return torch.device("cuda", index)


def _choose() -> DeepSpeedAccelerator:
    from zcomm.compat.deepspeed.accelerator.cpu_accelerator import CpuAccelerator  # inside: they derive from the base
    from zcomm.compat.deepspeed.accelerator.cuda_accelerator import CudaAccelerator

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
