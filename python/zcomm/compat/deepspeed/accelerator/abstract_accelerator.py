"""DeepSpeedAccelerator: the base of the accelerators, with the answers that all devices share.

DeepSpeed's class of this name is abstract; programs ask isinstance() of it. Source: DeepSpeed's accelerator interface.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_BUILDERS = "zcomm.compat.deepspeed.op_builder"


class DeepSpeedAccelerator:
    """A kind of device, as training programs ask for it."""

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
