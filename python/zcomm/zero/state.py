"""Optimizer state of this rank's shards: m, v and, for bf16, the master's remainder, in tiles, in RAM or on NVMe.

One fused pass per tile over (gradient, weight, m, v, remainder). In RAM the tiles of a bucket lie back to back; on NVMe
each tile is one extent and passes through a ring of windows: READ -> step -> WRITE, reads running ahead. A fraction
below 1 keeps evenly spread tiles in RAM: the step works on them while the next ones are read.
Both tiers run the same arithmetic on the same elements, so the bits are equal.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm._tensors import core_dtype, tensor_of
from zcomm.zero.options import Offload

Tile = tuple[int, int, int]  # bucket, first element of its shard, count
TILE_COUNT = 65536  # elements of a tile
WINDOWS = 6  # tiles in flight of the NVMe tier


def swapped_count(tiles: int, fraction: float) -> int:
    """How many of the first ``tiles`` tiles are on NVMe, where ``fraction`` of all are."""
    return math.floor(tiles * fraction + 0.5)


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

    waited_s = 0.0
    nbytes_by_tier: dict[str, int]

    def __init__(self, counts: Sequence[int], dtype: torch.dtype) -> None:
        self.counts = list(counts)
        self.dtype = dtype

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

    def __init__(self, counts: Sequence[int], dtype: torch.dtype, arena: _core.PinnedArena, offload: Offload) -> None:
        super().__init__(counts, dtype)
        nbytes = sum(self.shard_nbytes(count) for count in self.counts)
        offloaded = round(nbytes * offload.fraction) if offload.optimizer else 0
        self.nbytes_by_tier = {"cpu": offloaded, "device": nbytes - offloaded}
        self._lease: _core.Lease | None = arena.allocate(nbytes)
        base = tensor_of(self._lease, torch.uint8).data_ptr() if nbytes else 0
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
    """``fraction`` of the state on NVMe, WINDOWS tiles of that in RAM at a time; the other tiles always in RAM."""

    def __init__(
        self,
        counts: Sequence[int],
        dtype: torch.dtype,
        arena: _core.PinnedArena,
        swap: _core.SwapFile,
        fraction: float = 1.0,
    ) -> None:
        super().__init__(counts, dtype)
        self._swap = swap
        self._tile_nbytes = self.shard_nbytes(TILE_COUNT)
        self._writes: list[_core.Work | None] = [None] * WINDOWS
        self._place_tiles(arena, fraction)
        windows = min(WINDOWS, len(self._swapped))
        self._lease: _core.Lease | None = arena.allocate(windows * self._tile_nbytes)
        self._windows = list(tensor_of(self._lease, torch.uint8).split(self._tile_nbytes)) if windows else []
        for bucket, begin, count in self._swapped:
            swap.reserve(self._key(bucket, begin), self.shard_nbytes(count))

    def _place_tiles(self, arena: _core.PinnedArena, fraction: float) -> None:
        self._tiles: list[Tile] = [
            (bucket, begin, min(TILE_COUNT, count - begin))
            for bucket, count in enumerate(self.counts)
            for begin in range(0, count, TILE_COUNT)
        ]
        numbers = range(len(self._tiles))
        is_swapped = [swapped_count(i + 1, fraction) > swapped_count(i, fraction) for i in numbers]
        self._swapped = [tile for tile, swapped in zip(self._tiles, is_swapped, strict=True) if swapped]
        resident = [tile for tile, swapped in zip(self._tiles, is_swapped, strict=True) if not swapped]
        nbytes = sum(self.shard_nbytes(count) for _, _, count in resident)
        self._resident_lease: _core.Lease | None = arena.allocate(nbytes)
        address = tensor_of(self._resident_lease, torch.uint8).data_ptr() if nbytes else 0
        self._resident: dict[Tile, int] = {}
        for tile in resident:
            self._resident[tile] = address
            address += self.shard_nbytes(tile[2])
        swapped_nbytes = sum(self.shard_nbytes(count) for _, _, count in self._swapped)
        self.nbytes_by_tier = {"nvme": swapped_nbytes, "cpu": nbytes}

    @property
    def window_nbytes(self) -> int:
        return len(self._windows) * self._tile_nbytes

    @staticmethod
    def _key(bucket: int, begin: int) -> str:
        return f"state.{bucket}.{begin}"

    def start(self, bucket: int, weight: torch.Tensor, master: torch.Tensor) -> None:
        for begin in range(0, master.numel(), TILE_COUNT):
            part = slice(begin, min(begin + TILE_COUNT, master.numel()))
            count = part.stop - part.start
            resident = self._resident.get((bucket, begin, count))
            if resident is not None:
                _store_master(weight[part], resident, master[part])
                continue
            window = self._windows[0]
            window.zero_()
            _store_master(weight[part], window.data_ptr(), master[part])
            self._swap.write(self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count)).wait()

    def _read(self, number: int) -> _core.Work:
        """Start to read a swapped tile as soon as its window's last write is on disk."""
        self._wait(self._writes[number % WINDOWS])
        bucket, begin, count = self._swapped[number]
        window = self._windows[number % WINDOWS]
        return self._swap.read(self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count))

    def step(self, shards: Iterator[ShardStep]) -> None:
        """[Note: swapped step] Swapped tile i uses window i % WINDOWS; half of them read ahead, the others write back.

        The last writes go on while the next forward runs; the window's next read waits for them.
        """
        ahead = WINDOWS // 2
        reads: deque[_core.Work] = deque(self._read(number) for number in range(min(ahead, len(self._swapped))))
        shard = next(shards, None)
        number = 0  # of the next swapped tile
        for tile in self._tiles:
            bucket, begin, count = tile
            while shard is not None and shard.bucket != bucket:
                shard = next(shards, None)
            assert shard is not None, f"no shard for bucket {bucket}"
            resident = self._resident.get(tile)
            if resident is not None:
                self._step_tile(shard, resident, begin, count)
                continue
            self._wait(reads.popleft())
            window = self._windows[number % WINDOWS]
            self._step_tile(shard, window.data_ptr(), begin, count)
            self._writes[number % WINDOWS] = self._swap.write(
                self._key(bucket, begin), window.data_ptr(), self.shard_nbytes(count)
            )
            if number + ahead < len(self._swapped):
                reads.append(self._read(number + ahead))
            number += 1
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
            state = self._resident.get((bucket, begin, count))
            if state is None:
                state = self._windows[0].data_ptr()
                self._swap.read(self._key(bucket, begin), state, self.shard_nbytes(count)).wait()
            shard = _core_shard(weight[part], master[part], state, count, 0, count)
            _core.join_master(shard, master[part].data_ptr())
        return master

    def close(self) -> None:
        self._writes.clear()  # dropping a Work waits for it
        self._windows.clear()
        self._resident.clear()
        self._lease = self._resident_lease = None
