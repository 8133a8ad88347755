"""Optimizer state of this rank's shards: m, v and, for bf16, the master's remainder, in tiles, in RAM or on NVMe.

One fused pass per tile over (gradient, weight, m, v, remainder). In RAM the tiles of a bucket lie back to back; on NVMe
each tile is one extent and passes through a ring of windows: READ -> step -> WRITE, reads running ahead.
Both tiers run the same arithmetic on the same elements, so the bits are equal.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm._tensors import core_dtype, tensor_of

TILE_COUNT = 65536  # elements of a tile
WINDOWS = 6  # tiles in flight of the NVMe tier


@dataclass(frozen=True)
class ShardStep:
    """What one bucket's shard needs in a step: flat weight and gradient, and (begin, end, hyperparameters) runs."""

    bucket: int
    weight: torch.Tensor
    grad: torch.Tensor
    runs: Sequence[tuple[int, int, _core.AdamParams]]


def _core_shard(
    weight: torch.Tensor, grad: torch.Tensor, state: int, count: int, begin: int, end: int
) -> _core.AdamShard:
    return _core.AdamShard(
        weight=weight.data_ptr(),
        weight_dtype=core_dtype(weight.dtype),
        grad=grad.data_ptr(),
        grad_dtype=core_dtype(grad.dtype),
        state=state,
        count=count,
        tile_count=TILE_COUNT,
        begin=begin,
        end=end,
    )


def _store_master(weight: torch.Tensor, state: int, master: torch.Tensor) -> None:
    """Write ``master`` (fp32) to the weight and, for bf16, its remainder to ``state``."""
    if weight.dtype == torch.float32:
        weight.copy_(master)
    else:
        shard = _core_shard(weight, master, state, master.numel(), 0, master.numel())
        _core.split_master(shard, master.data_ptr())


class ShardState(ABC):
    """State of the shards ``counts`` (elements per bucket) for weights of ``dtype``."""

    tier: str
    waited_s = 0.0

    def __init__(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        self.counts = list(counts)
        self.dtype = dtype
        self.nbytes = sum(self.shard_nbytes(count) for count in self.counts)

    def shard_nbytes(self, count: int) -> int:
        nbytes: int = _core.adam_state_nbytes(core_dtype(self.dtype), count)
        return nbytes

    @abstractmethod
    def start(self, bucket: int, weight: torch.Tensor, master: torch.Tensor) -> None:
        """Begin a shard: weight and remainder from the fp32 ``master``, m = v = 0."""

    @abstractmethod
    def step(self, shards: Iterator[ShardStep]) -> None:
        """One optimizer step over all shards."""

    @abstractmethod
    def master(self, bucket: int, weight: torch.Tensor) -> torch.Tensor:
        """The exact fp32 master of a shard, flat [count]."""

    @property
    def window_nbytes(self) -> int:
        return 0

    @abstractmethod
    def close(self) -> None: ...


class RamState(ShardState):
    """State in the pinned arena (tier "cpu") or beside the model (tier "device"; the same memory on the CPU)."""

    def __init__(self, counts: Sequence[int], dtype: torch.dtype, tier: str, arena: _core.PinnedArena) -> None:
        super().__init__(counts, dtype)
        self.tier = tier
        self._lease: _core.Lease | None = arena.allocate(self.nbytes)
        base = tensor_of(self._lease, torch.uint8).data_ptr() if self.nbytes else 0
        self._addresses: list[int] = []
        for count in self.counts:
            self._addresses.append(base)
            base += self.shard_nbytes(count)

    def start(self, bucket: int, weight: torch.Tensor, master: torch.Tensor) -> None:
        _store_master(weight, self._addresses[bucket], master)

    def step(self, shards: Iterator[ShardStep]) -> None:
        for shard in shards:
            count = self.counts[shard.bucket]
            for begin, end, params in shard.runs:
                _core.adam_step(
                    _core_shard(shard.weight, shard.grad, self._addresses[shard.bucket], count, begin, end), params
                )

    def master(self, bucket: int, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.float32:
            return weight.clone()
        master = torch.empty(self.counts[bucket])
        count = master.numel()
        _core.join_master(_core_shard(weight, master, self._addresses[bucket], count, 0, count), master.data_ptr())
        return master

    def close(self) -> None:
        self._lease = None


class SwappedState(ShardState):
    """State on NVMe; WINDOWS tiles of it in RAM at a time."""

    tier = "nvme"

    def __init__(
        self, counts: Sequence[int], dtype: torch.dtype, arena: _core.PinnedArena, swap: _core.SwapFile
    ) -> None:
        super().__init__(counts, dtype)
        self._swap = swap
        self._tile_nbytes = self.shard_nbytes(TILE_COUNT)
        self._lease: _core.Lease | None = arena.allocate(WINDOWS * self._tile_nbytes)
        flat = tensor_of(self._lease, torch.uint8)
        self._windows = [flat[i * self._tile_nbytes : (i + 1) * self._tile_nbytes] for i in range(WINDOWS)]
        self._tiles = [
            (bucket, begin, min(TILE_COUNT, count - begin))
            for bucket, count in enumerate(self.counts)
            for begin in range(0, count, TILE_COUNT)
        ]
        self._writes: list[_core.Work | None] = [None] * WINDOWS
        for bucket, begin, count in self._tiles:
            swap.reserve(self._key(bucket, begin), self.shard_nbytes(count))

    @property
    def window_nbytes(self) -> int:
        return len(self._windows) * self._tile_nbytes

    @staticmethod
    def _key(bucket: int, begin: int) -> str:
        return f"state.{bucket}.{begin}"

    def start(self, bucket: int, weight: torch.Tensor, master: torch.Tensor) -> None:
        window = self._windows[0]
        for begin in range(0, master.numel(), TILE_COUNT):
            part = slice(begin, min(begin + TILE_COUNT, master.numel()))
            window.zero_()
            _store_master(weight[part], window.data_ptr(), master[part])
            nbytes = self.shard_nbytes(part.stop - part.start)
            self._swap.write(self._key(bucket, begin), window.data_ptr(), nbytes).wait()

    def _read(self, tile: int) -> _core.Work:
        """Start to read a tile as soon as its window's last write is on disk."""
        self._wait(self._writes[tile % WINDOWS])
        bucket, begin, count = self._tiles[tile]
        window = self._windows[tile % WINDOWS]
        return self._swap.read(self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count))

    def step(self, shards: Iterator[ShardStep]) -> None:
        """[Note: swapped step] Tile i uses window i % WINDOWS; half of the windows read ahead, the others write back.

        The last writes go on while the next forward runs; the window's next read waits for them.
        """
        ahead = WINDOWS // 2
        reads: deque[_core.Work] = deque(self._read(tile) for tile in range(min(ahead, len(self._tiles))))
        shard = next(shards, None)
        for tile, (bucket, begin, count) in enumerate(self._tiles):
            while shard is not None and shard.bucket != bucket:
                shard = next(shards, None)
            assert shard is not None, f"no shard for bucket {bucket}"
            self._wait(reads.popleft())
            window = self._windows[tile % WINDOWS]
            self._step_tile(shard, window.data_ptr(), begin, count)
            self._writes[tile % WINDOWS] = self._swap.write(
                self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count)
            )
            if tile + ahead < len(self._tiles):
                reads.append(self._read(tile + ahead))
        for _ in shards:  # lets the source of shards finish its last one
            pass

    def _step_tile(self, shard: ShardStep, state: int, tile_begin: int, tile_count: int) -> None:
        tile = slice(tile_begin, tile_begin + tile_count)
        weight, grad = shard.weight[tile], shard.grad[tile]
        for begin, end, params in shard.runs:
            low, high = max(begin, tile.start) - tile_begin, min(end, tile.stop) - tile_begin
            if low < high:
                _core.adam_step(_core_shard(weight, grad, state, tile_count, low, high), params)

    def _wait(self, work: _core.Work | None) -> None:
        if work is not None:
            start = time.perf_counter()
            work.wait()
            self.waited_s += time.perf_counter() - start

    def master(self, bucket: int, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == torch.float32:
            return weight.clone()
        self._wait(self._writes[0])
        master = torch.empty(self.counts[bucket])
        for begin in range(0, master.numel(), TILE_COUNT):
            part = slice(begin, min(begin + TILE_COUNT, master.numel()))
            count = part.stop - part.start
            window = self._windows[0]
            self._swap.read(self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count)).wait()
            shard = _core_shard(weight[part], master[part], window.data_ptr(), count, 0, count)
            _core.join_master(shard, master[part].data_ptr())
        return master

    def close(self) -> None:
        self._writes.clear()  # dropping a Work waits for it
        self._windows.clear()
        self._lease = None
