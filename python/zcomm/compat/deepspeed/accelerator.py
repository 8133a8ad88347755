"""``deepspeed.accelerator``: the questions that training scripts ask about their device, answered for the CPU."""

from __future__ import annotations

import torch


class CpuAccelerator:
    """What ``get_accelerator()`` returns. zcomm's ranks compute on the CPU; an index is accepted and means the same."""

    def device_name(self, device_index: int | None = None) -> str:
        """What ``tensor.to()`` takes."""
        return "cpu"

    current_device_name = device_name

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def set_device(self, device_index: int) -> None:
        """Nothing to set."""

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
        """Nothing runs behind the program's back."""

    def empty_cache(self) -> None:
        """There is none."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed


_accelerator = CpuAccelerator()


def get_accelerator() -> CpuAccelerator:
    """The one that there is."""
    return _accelerator
