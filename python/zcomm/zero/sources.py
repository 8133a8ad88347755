"""Sources: where stage 3 keeps this rank's parameter shards between gathers: in RAM or in a swap file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from zcomm import _core
from zcomm._tensors import tensor_of
from zcomm.zero.geometry import FlatBucket, Geometry

WINDOWS = 3  # shards in flight of a swapped step


class ShardSource(ABC):
    """This rank's shards of all buckets. ``fetch`` runs on the gathering thread, the rest on the main thread."""

    tier: str
    nbytes: int

    @abstractmethod
    def begin(self, bucket: FlatBucket) -> torch.Tensor: ...
    @abstractmethod
    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None: ...
    @abstractmethod
    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> _core.Work | None:
        """Start to copy the shard to ``out``; None when it is there already."""

    @abstractmethod
    def sweep(self) -> Iterator[tuple[FlatBucket, torch.Tensor]]: ...

    @property
    def window_nbytes(self) -> int:
        return 0

    @abstractmethod
    def close(self) -> None: ...


class RamSource(ShardSource):
    """Shards in the pinned arena."""

    def __init__(self, geometry: Geometry, dtype: torch.dtype, tier: str, arena: _core.PinnedArena) -> None:
        self.tier = tier
        self.nbytes = geometry.shard_count * dtype.itemsize
        self._buckets = geometry.buckets
        self._flat = tensor_of(arena.allocate(self.nbytes), dtype, geometry.shard_count)

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._flat[bucket.shard_begin : bucket.shard_begin + bucket.shard_count]

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        pass  # begin() gave the memory itself

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> None:
        out.copy_(self.begin(bucket))

    def sweep(self) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket in self._buckets:
            yield bucket, self.begin(bucket)

    def close(self) -> None:
        self._flat = torch.empty(0)


class SwapSource(ShardSource):
    """Shards in a swap file, one extent per bucket. Operations on one key run in call order, so a fetch after a
    sweep reads what the sweep wrote."""

    tier = "nvme"

    def __init__(self, geometry: Geometry, dtype: torch.dtype, arena: _core.PinnedArena, swap: _core.SwapFile) -> None:
        self.nbytes = geometry.shard_count * dtype.itemsize
        self._buckets = geometry.buckets
        self._swap = swap
        largest = max((bucket.shard_count for bucket in geometry.buckets), default=0)
        page = _core.page_nbytes()
        stride = -(-largest * dtype.itemsize // page) * page // dtype.itemsize
        self._lease_nbytes = WINDOWS * stride * dtype.itemsize
        flat = tensor_of(arena.allocate(self._lease_nbytes), dtype)
        self._windows = [flat[i * stride : i * stride + largest] for i in range(WINDOWS)]
        self._writes: list[_core.Work | None] = [None] * WINDOWS
        for bucket in geometry.buckets:
            swap.reserve(self._key(bucket), bucket.shard_count * dtype.itemsize)

    @property
    def window_nbytes(self) -> int:
        return self._lease_nbytes

    @staticmethod
    def _key(bucket: FlatBucket) -> str:
        return f"parameters.{bucket.index}"

    def _window(self, bucket: FlatBucket) -> torch.Tensor:
        """The bucket's window, once its last write is on disk."""
        number = bucket.index % WINDOWS
        write = self._writes[number]
        if write is not None:
            write.wait()
            self._writes[number] = None
        return self._windows[number][: bucket.shard_count]

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._window(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._writes[bucket.index % WINDOWS] = self._swap.write(self._key(bucket), weight.data_ptr(), weight.nbytes)

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> _core.Work:
        return self._swap.read(self._key(bucket), out.data_ptr(), out.nbytes)

    def sweep(self) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        ahead = [self.fetch(bucket, self._window(bucket)) for bucket in self._buckets[:1]]
        for position, bucket in enumerate(self._buckets):
            work = ahead.pop()
            if position + 1 < len(self._buckets):
                upcoming = self._buckets[position + 1]
                ahead.append(self.fetch(upcoming, self._window(upcoming)))
            work.wait()
            weight = self._windows[bucket.index % WINDOWS][: bucket.shard_count]
            yield bucket, weight
            self.commit(bucket, weight)

    def close(self) -> None:
        self._writes.clear()
        self._windows.clear()
