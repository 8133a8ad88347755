"""ErrorRing: errors of encoded gradients on a drive; the windows of a SpanCache hold a few buckets' at a time.

[Note: errors on a drive] A bucket's errors are read before its gradients are encoded, and written behind that. The
errors of the next bucket are read meanwhile. A change of all errors (the loss scale, a restart) is applied as each is
read. If a read or write fails, collectives continue with errors of zero, and all ranks raise the error in ``step()``.
Memory: WINDOWS times the largest bucket's errors. On the drive: whole pages for each bucket.
Thread rule: as GradientReducer; one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype
from zcomm.zero.cache.span_cache import SpanCache, windows_nbytes
from zcomm.zero.cache.swap import SCRATCH, Swap

WINDOWS = 4  # buckets that are reduced at the same time, and one that is read
_ALIGN = 64  # bytes: of encoded elements


def error_sizes(dtype: torch.dtype, counts: Mapping[int, Sequence[tuple[int, int]]]) -> dict[int, list[int]]:
    """Return the bytes of each error of each bucket. counts: elements, in parts of so many."""

    def nbytes(count: int, step: int) -> int:
        return int(_core.error_count(core_dtype(dtype), count, step)) * dtype.itemsize

    return {index: [nbytes(*count) for count in each] for index, each in counts.items()}


def _begins(sizes: Sequence[int]) -> list[int]:
    """Return the beginning of each error in its item, and the end of the last one."""
    return list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))


def item_nbytes(sizes: Sequence[int]) -> int:
    """Return the bytes of an item with errors of these ``sizes``."""
    return _begins(sizes)[-1]


def ring_nbytes(sizes: Mapping[int, Sequence[int]]) -> int:
    """Return the bytes of the windows."""
    return windows_nbytes(max(map(item_nbytes, sizes.values()), default=0), len(sizes), WINDOWS)


@dataclass(frozen=True)
class ErrorDrive:
    """The place of errors. finish: waits until the operation that changes a bucket's errors has ended."""

    swap: Swap
    arena: _core.PinnedArena
    finish: Callable[[int], None]


class ErrorRing:
    """The errors of the buckets of ``sizes``, in launch order. name: of the codec, for keys."""

    def __init__(self, drive: ErrorDrive, name: str, sizes: Mapping[int, Sequence[int]]) -> None:
        self._finish, self._sizes, self._order = drive.finish, sizes, list(sizes)
        self._item = {index: item for item, index in enumerate(self._order)}

        def keys(item: int) -> Iterable[tuple[str, int]]:
            index = self._order[item]
            return ((f"{SCRATCH}errors.{name}.{index}", item_nbytes(sizes[index])),)

        self._cache = SpanCache(drive.swap, drive.arena, len(sizes), keys, WINDOWS)
        self._used: dict[int, int] = {}  # by window: the bucket that an operation changes
        self._changes = dict.fromkeys(sizes, 1.0)  # by bucket: the factor that its errors still lack
        self._lost: OSError | None = None

    def of(self, index: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the errors of a bucket, in its window."""
        memory, sizes = self._cache.memory(self._item[index]), self._sizes[index]
        places = zip(_begins(sizes), sizes, strict=False)
        return tuple(memory[begin : begin + size].view(dtype) for begin, size in places)

    def change(self, factor: float) -> None:
        """Multiply all errors."""
        if factor != 1.0:
            self._changes = {index: change * factor for index, change in self._changes.items()}

    def take(self, index: int) -> float:
        """Bring a bucket's errors into its window, until ``ended``. Return the factor that they still lack; 0: they
        have any values."""
        item = self._item[index]
        window = self._cache.window(item)
        if window in self._used:
            self._finish(self._used[window])
            self.ended(self._used.get(window, index))
        change, self._changes[index] = self._changes[index], 1.0
        try:
            self._cache.edit(item, load=change != 0.0)
        except OSError as error:
            self._lost, change = self._lost or error, 0.0
            self._cache.discard(item)
        self._used[window] = index
        following = self._order[(item + 1) % len(self._order)]
        if self._cache.window(self._item[following]) not in self._used and self._changes[following] != 0.0:
            self._try(self._cache.prefetch_if_free, following)
        return change

    def ended(self, index: int) -> None:
        """Start to write a bucket's errors, if an operation has changed them."""
        window = self._cache.window(self._item[index]) if index in self._item else -1
        if self._used.get(window) == index:
            del self._used[window]
            self._try(self._cache.write, index)

    def _try(self, act: Callable[[int], None], index: int) -> None:
        try:
            act(self._item[index])
        except OSError as error:
            self._lost = self._lost or error

    def lost(self) -> OSError | None:
        """Return the error that has lost errors since the last call; all errors are zero then."""
        error, self._lost = self._lost, None
        if error is None:
            return None
        self._cache.erase(lost=True)
        self._changes = dict.fromkeys(self._changes, 0.0)
        words = f"the errors of encoded gradients on the drive are lost, and restart at zero ({error})"
        return OSError(error.errno, f"{words}: call zero_grad() and run backward again")

    @property
    def nbytes(self) -> list[tuple[str, str, int]]:
        stored = sum(size for sizes in self._sizes.values() for size in sizes)
        return [("nvme", "errors", stored), ("cpu", "slots", self._cache.nbytes)]

    def close(self) -> None:
        self._cache.close()
