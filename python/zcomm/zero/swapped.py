"""Optimizer state on NVMe: tiles READ -> step -> WRITE through a ring of windows, reads running ahead.

[Note: swapped step] Swapped tile i uses window i % WINDOWS; half of the windows read ahead, the others write back. The
last writes go on while the next forward runs; the window's next read waits for them. Sweeps alternate their direction:
the next one begins with the tiles that the last one left in the windows, so that these need not be read.
A fraction below 1 keeps evenly spread tiles in RAM: the step works on them while the next ones are read.
Source: ZeRO-Infinity (arXiv:2104.07857) section 5.1; decision D8.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from zcomm import _core
from zcomm._tensors import tensor_of
from zcomm.zero.rules import Rule
from zcomm.zero.state import ShardState, ShardStep
from zcomm.zero.tile import cut

Tile = tuple[int, int, int]  # bucket, first element of its shard, count
WINDOWS = 6  # tiles in flight


def swapped_count(tiles: int, fraction: float) -> int:
    """How many of the first ``tiles`` tiles are on NVMe, where ``fraction`` of all are."""
    return math.floor(tiles * fraction + 0.5)


class SwappedState(ShardState):
    """``fraction`` of the state on NVMe, WINDOWS tiles of that in RAM at a time; the other tiles always in RAM."""

    def __init__(
        self,
        counts: Sequence[int],
        dtype: torch.dtype,
        rule: Rule,
        arena: _core.PinnedArena,
        swap: _core.SwapFile,
        fraction: float = 1.0,
    ) -> None:
        super().__init__(counts, dtype, rule)
        self._swap = swap
        self._place_tiles(arena, fraction)
        largest = max((count for _, _, count in self._swapped), default=0)
        self._tile_nbytes = -(-self.form.nbytes(largest) // _core.page_nbytes()) * _core.page_nbytes()
        windows = min(WINDOWS, len(self._swapped))
        memory = tensor_of(arena.allocate(windows * self._tile_nbytes), torch.uint8) if windows else torch.empty(0)
        self._windows = list(memory.split(self._tile_nbytes)) if windows else []
        self._holds = [-1] * windows  # swapped tile whose state, as last written, is in the window
        self._writes: list[_core.Work | None] = [None] * windows
        for bucket, begin, count in self._swapped:
            swap.reserve(self._key(bucket, begin), self.form.nbytes(count))

    def _place_tiles(self, arena: _core.PinnedArena, fraction: float) -> None:
        self._tiles: list[Tile] = [
            (bucket, part.start, part.stop - part.start)
            for bucket, count in enumerate(self.counts)
            for part in cut(count)
        ]
        is_swapped = [swapped_count(i + 1, fraction) > swapped_count(i, fraction) for i in range(len(self._tiles))]
        self._swapped = [tile for tile, swapped in zip(self._tiles, is_swapped, strict=True) if swapped]
        self._numbers = {tile: number for number, tile in enumerate(self._swapped)}
        resident = [tile for tile in self._tiles if tile not in self._numbers]
        sizes = [self.form.nbytes(count) for _, _, count in resident]
        memory = tensor_of(arena.allocate(sum(sizes)), torch.uint8) if sum(sizes) else torch.empty(0)
        self._resident = dict(zip(resident, memory.split(sizes) if resident else (), strict=True))
        swapped_nbytes = sum(self.form.nbytes(count) for _, _, count in self._swapped)
        self.nbytes_by_tier = {"nvme": swapped_nbytes, "cpu": sum(sizes)}

    @property
    def window_nbytes(self) -> int:
        return len(self._windows) * self._tile_nbytes

    @staticmethod
    def _key(bucket: int, begin: int) -> str:
        return f"state.{bucket}.{begin}"

    # --- one tile ---------------------------------------------------------------------------------------------

    def _window(self, number: int) -> torch.Tensor:
        count = self._swapped[number][2]
        window: torch.Tensor = self._windows[number % len(self._windows)]
        return window[: self.form.nbytes(count)]

    def _read(self, number: int) -> _core.Work | None:
        """Start to read a swapped tile once its window's last write is on disk; None: the window still holds it."""
        slot = number % len(self._windows)
        if self._holds[slot] == number:
            return None
        self._wait(self._writes[slot])
        self._writes[slot] = None
        self._holds[slot] = number
        bucket, begin, _ = self._swapped[number]
        window = self._window(number)
        return self._swap.read(self._key(bucket, begin), window.data_ptr(), window.nbytes)

    def _write(self, number: int) -> None:
        bucket, begin, _ = self._swapped[number]
        window = self._window(number)
        self._writes[number % len(self._windows)] = self._swap.write(
            self._key(bucket, begin), window.data_ptr(), window.nbytes
        )

    def _claim(self, number: int) -> torch.Tensor:
        """The tile's window, free to be changed: no write of it is on its way."""
        slot = number % len(self._windows)
        self._wait(self._writes[slot])
        self._writes[slot] = None
        self._holds[slot] = number
        return self._window(number)

    @contextmanager
    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Iterator[torch.Tensor]:
        tile = (bucket, part.start, part.stop - part.start)
        resident = self._resident.get(tile)
        if resident is not None:
            yield resident
            return
        number = self._numbers[tile]
        if load:
            self._wait(self._read(number))
        window = self._claim(number) if store else self._window(number)
        yield window
        if store:
            self._write(number)

    # --- the sweep --------------------------------------------------------------------------------------------

    def step(self, shards: Iterator[ShardStep], reverse: bool = False) -> None:
        order = range(len(self._swapped))
        numbers = deque(reversed(order) if reverse else order)  # swapped tiles still to be read
        reads: deque[_core.Work | None] = deque()
        for _ in range(min(WINDOWS // 2, len(numbers))):
            reads.append(self._read(numbers.popleft()))
        shard = next(shards, None)
        for tile in reversed(self._tiles) if reverse else self._tiles:
            bucket, begin, count = tile
            while shard is not None and shard.bucket != bucket:
                shard = next(shards, None)
            assert shard is not None, f"no shard for bucket {bucket}"
            part = slice(begin, begin + count)
            resident = self._resident.get(tile)
            if resident is not None:
                self._step_tile(shard, resident, part)
                continue
            self._wait(reads.popleft())
            number = self._numbers[tile]
            self._step_tile(shard, self._claim(number), part)
            self._write(number)
            if numbers:
                reads.append(self._read(numbers.popleft()))
        for _ in shards:  # lets the source of shards finish its last one
            pass

    def _wait(self, work: _core.Work | None) -> None:
        if work is not None:
            start = time.perf_counter()
            try:
                work.wait()
            except BaseException:
                self._holds = [-1] * len(self._holds)  # nobody knows what is in the windows
                raise
            self.waited_s += time.perf_counter() - start

    def close(self) -> None:
        self._writes.clear()  # dropping a Work waits for it
        self._windows.clear()
        self._resident.clear()
