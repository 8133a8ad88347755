"""Squares of gradients on a device, block by block: only the sums of blocks of 64 elements come to the host.

A ring of SLOTS slots, a shard each: torch's stream squares, the lane's ``out`` brings the sums, the host adds those of
the shard before meanwhile. The sum is exact ([Note: gradient norm]), so the norm's bits are the CPU's.
Thread rule: one thread at a time; what is squared has been put on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm._tensors import core_dtype, tensor_of
from zcomm.zero.norm import BLOCK, GradientNorm

SLOTS = 3


class DeviceSquares:
    """largest: elements of a shard."""

    def __init__(self, largest: int, lane: DeviceLane, arena: _core.PinnedArena) -> None:
        blocks = -(-largest // BLOCK)
        self._lane = lane
        self._there = [lane.empty(blocks, torch.float64, "sums of squares") for _ in range(SLOTS)]
        memory = [arena.allocate(8 * blocks) for _ in range(SLOTS)]
        self._here = [tensor_of(each, torch.float64) for each in memory]
        self._squared = [lane.event() for _ in range(SLOTS)]
        self._came = [lane.event() for _ in range(SLOTS)]

    @property
    def slot_nbytes(self) -> int:
        """On the device, and as many on the host."""
        return sum(there.nbytes for there in self._there)

    def add(self, norm: GradientNorm, shards: Iterable[torch.Tensor]) -> None:
        """Add the squares of flat gradients on the device to ``norm``."""
        waiting: list[torch.Tensor] = []  # sums on their way, oldest first
        number = 0
        for shard in shards:
            if len(waiting) == SLOTS:
                self._land(norm, waiting.pop(0), number % SLOTS)
            waiting.append(self._start(shard, number % SLOTS))
            number += 1
        for at, sums in enumerate(waiting, number - len(waiting)):
            self._land(norm, sums, at % SLOTS)

    def _start(self, shard: torch.Tensor, slot: int) -> torch.Tensor:
        blocks = -(-shard.numel() // BLOCK)
        there, here = self._there[slot][:blocks], self._here[slot][:blocks]
        stream = self._lane.current()
        _core.stream_squares(stream, there.data_ptr(), shard.data_ptr(), core_dtype(shard.dtype), shard.numel())
        stream.record(self._squared[slot])
        self._lane.out.carry([(here, there)], [self._squared[slot]], self._came[slot])
        return here

    def _land(self, norm: GradientNorm, sums: torch.Tensor, slot: int) -> None:
        self._wait(slot)
        norm.add_blocks(sums)

    def _wait(self, slot: int) -> None:
        self._came[slot].synchronize()

    def close(self) -> None:
        self._there.clear()
        self._here.clear()
