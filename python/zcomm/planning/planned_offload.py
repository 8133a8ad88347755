"""offload_activations of tensors without memory: the same code, over buffers and a swap file that hold nothing.

The bytes of both are those of training, whatever the order in which storages leave and return.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zcomm.memory.activations import offload_activations
from zcomm.zero.cache.span_cache import whole_pages


class _Buffers:
    """Stands for PinnedArena."""

    def __init__(self) -> None:
        self.nbytes = 0

    def empty(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        self.nbytes += whole_pages(nbytes)
        with _disable_current_modes():
            return torch.empty(nbytes, dtype=dtype, device="meta")

    def stats(self) -> dict[str, int]:
        return {"used_nbytes": self.nbytes}


class _Done:
    def wait(self) -> None: ...


class _File:
    """Stands for SwapFile."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def write(self, key: str, buffer: torch.Tensor) -> _Done:
        self.sizes[key] = whole_pages(buffer.nbytes)
        return _Done()

    def read(self, key: str, out: torch.Tensor) -> _Done:
        return _Done()

    def stats(self) -> dict[str, int]:
        return {"reserved_nbytes": sum(self.sizes.values())}


class PlannedOffload(offload_activations):
    """offload_activations of tensors without memory. tier: "cpu" or "nvme"."""

    _on_meta = True

    def __init__(self, tier: str, min_nbytes: int = 2**20) -> None:
        super().__init__("cpu", min_nbytes=min_nbytes)
        stand_ins: Any = _Buffers(), _File()
        self._arena, file = stand_ins
        self._swap = file if tier == "nvme" else None

    def _lane(self, device: torch.device) -> None:
        return None

    def nbytes_by_tier(self) -> dict[str, int]:
        """Return the bytes of buffers on the host, and those on the drive."""
        found = self.stats()
        return {"cpu": found["buffer_nbytes"], "nvme": found["swap_nbytes"]}
