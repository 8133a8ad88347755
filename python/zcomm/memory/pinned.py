"""Pinned host memory: exact sizes, budgets that are errors, every byte counted.

Invariant: an arena's memory is freed when the last tensor over it is freed; a tensor may outlive its arena.
Thread rule: free-threaded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from zcomm import _core


class PinnedArena:
    """Host memory for staging and offloaded state.

    budget_nbytes: of this arena, in whole pages; None: only the process's budget, ``ZCOMM_PINNED_BUDGET``, which counts
    all arenas (ZeroOptimizer's, too). keep_resident: memory that is never paged out (by mlock if CUDA does not lock
    it), or an error. Without it, memory is page-locked if CUDA is available, and on huge pages if granted.
    """

    def __init__(self, budget_nbytes: int | None = None, *, keep_resident: bool = False) -> None:
        if budget_nbytes is not None and budget_nbytes < 0:
            raise ValueError(f"PinnedArena: budget_nbytes {budget_nbytes} is negative")
        self._core = _core.PinnedArena(budget_nbytes, keep_resident=keep_resident)

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a zero-filled CPU tensor of exactly the size asked for, in whole pages of 4 KiB.

        Raises: ValueError (negative size); OSError with errno ENOMEM naming the request, the bytes in use, both budgets
        and RLIMIT_MEMLOCK.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"pinned_empty: shape {sizes} has a negative size")
        count = math.prod(sizes)
        if count == 0:
            return torch.empty(sizes, dtype=dtype)
        lease = self._core.allocate(count * dtype.itemsize)  # kept alive by the tensor
        return torch.frombuffer(lease, dtype=dtype, count=count).view(sizes)

    def stats(self) -> dict[str, int]:
        """Return used_nbytes, peak_nbytes (the high-water mark), locked_nbytes (by CUDA or mlock), allocation_count;
        process_nbytes, process_peak_nbytes: of all arenas of the process.
        """
        return self._core.stats()


@functools.cache
def default_arena() -> PinnedArena:
    """Return the arena of ``pinned_empty``."""
    return PinnedArena()


def pinned_empty(shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate a CPU tensor of exactly that size: page-locked if CUDA is available, on huge pages if granted.

    shape: of the result. Memory: product(shape) * itemsize bytes, rounded up to pages of 4 KiB (torch's own pinned
    memory rounds up to a power of two). It is freed when the last tensor over it is freed. Zero-filled.
    Raises: ValueError (negative size); OSError with errno ENOMEM naming the request and ``ZCOMM_PINNED_BUDGET``.
    """
    return default_arena().empty(shape, dtype)
