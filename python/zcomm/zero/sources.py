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
    def sweep(self, reverse: bool) -> Iterator[tuple[FlatBucket, torch.Tensor]]: ...

    @abstractmethod
    def load(self, bucket: FlatBucket) -> torch.Tensor:
        """The shard as it is now; ``commit`` keeps what was changed."""

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

    def sweep(self, reverse: bool) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket in reversed(self._buckets) if reverse else self._buckets:
            yield bucket, self.begin(bucket)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        return self.begin(bucket)

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
        self._holds = [-1] * WINDOWS  # bucket whose shard, as last written, is in the window
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
        self._holds[number] = -1
        return self._windows[number][: bucket.shard_count]

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self._window(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        number = bucket.index % WINDOWS
        self._writes[number] = self._swap.write(self._key(bucket), weight.data_ptr(), weight.nbytes)
        self._holds[number] = bucket.index

    def fetch(self, bucket: FlatBucket, out: torch.Tensor) -> _core.Work:
        return self._swap.read(self._key(bucket), out.data_ptr(), out.nbytes)

    def _fetch_window(self, bucket: FlatBucket) -> _core.Work | None:
        """Start to read the shard into its window; None where the last sweep left it there."""
        held = self._holds[bucket.index % WINDOWS] == bucket.index
        window = self._window(bucket)
        return None if held else self.fetch(bucket, window)

    def sweep(self, reverse: bool) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        order = self._buckets[::-1] if reverse else self._buckets
        ahead = [self._fetch_window(bucket) for bucket in order[:1]]
        for position, bucket in enumerate(order):
            work = ahead.pop()
            if position + 1 < len(order):
                ahead.append(self._fetch_window(order[position + 1]))
            if work is not None:
                work.wait()
            weight = self._windows[bucket.index % WINDOWS][: bucket.shard_count]
            yield bucket, weight
            self.commit(bucket, weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        work = self._fetch_window(bucket)
        if work is not None:
            work.wait()
        return self._windows[bucket.index % WINDOWS][: bucket.shard_count]

    def close(self) -> None:
        self._writes.clear()
        self._windows.clear()
