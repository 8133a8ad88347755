"""``deepspeed.accelerator``: properties of the device, as training scripts read them.

The device is CUDA where torch and the core both have a working one, else the CPU. ``DS_ACCELERATOR=cpu`` (or ``cuda``)
in the environment chooses it instead. It is chosen once, by the first call.
"""

from __future__ import annotations

import os

import torch


class CpuAccelerator:
    """The CPU. An index is accepted, and means the same."""

    def device_name(self, device_index: int | None = None) -> str:
        """Return a name that ``tensor.to()`` takes."""
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is nothing to set."""

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def communication_backend_name(self) -> str:
        return "zcomm"

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: no operation of the CPU is asynchronous."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


class CudaAccelerator(CpuAccelerator):
    """torch.cuda under DeepSpeed's names; no index: the current device."""

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def is_bf16_supported(self) -> bool:
        return bool(torch.cuda.is_bf16_supported())

    def synchronize(self, device_index: int | None = None) -> None:
        torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def manual_seed(self, seed: int) -> None:
        torch.cuda.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.cuda.manual_seed_all(seed)


_accelerator: CpuAccelerator | None = None


def get_accelerator() -> CpuAccelerator:
    """Return the accelerator of this process.

    Raises: ValueError, RuntimeError for a DS_ACCELERATOR that cannot be served.
    """
    global _accelerator
    if _accelerator is None:
        _accelerator = _choose()
    return _accelerator


def training_device() -> torch.device | None:
    """Return the device that ``initialize`` moves the model to; None: the model stays where it is.

    Among CUDA devices the rank's number on its host chooses.
    """
    accelerator = get_accelerator()
    if not isinstance(accelerator, CudaAccelerator):
        return None
    index = int(os.environ.get("LOCAL_RANK", "0")) % accelerator.device_count()
    accelerator.set_device(index)
    return accelerator.device(index)


def _choose() -> CpuAccelerator:
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
    from zcomm import _core  # here, so that the names can be imported where the core is not built

    return _core.cuda_available()
