"""Squares of gradients on a device: they are added up there, and 560 bytes come to the host.

Kernels on torch's stream add the squares of every shard to the words of an exact sum ([Note: gradient norm]), which the
lane's ``out`` brings; exact, so the norm's bits are the CPU's.
Thread rule: one thread at a time; what is squared has been put on torch's current stream.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zcomm import _core
from zcomm._lane import DeviceLane
from zcomm._tensors import core_dtype, tensor_of
from zcomm.zero.norm import GradientNorm


class DeviceSquares:
    """``start`` and ``end`` take turns."""

    def __init__(self, lane: DeviceLane, arena: _core.PinnedArena) -> None:
        words = _core.EXACT_SUM_WORDS
        self._lane = lane
        self._there = lane.empty(words, torch.int64, "a sum of squares")
        self._here = tensor_of(arena.allocate(8 * words), torch.int64)[:words]
        self._summed = lane.event()
        self._came = lane.event()

    def start(self, shards: Iterable[torch.Tensor]) -> None:
        """Square flat gradients on the device; nobody waits."""
        stream, words = self._lane.current(), self._there
        stream.fill(words.data_ptr(), 0, words.nbytes)
        for shard in shards:
            _core.stream_norm(stream, words.data_ptr(), shard.data_ptr(), core_dtype(shard.dtype), shard.numel())
        stream.record(self._summed)
        self._lane.out.carry([(self._here, words)], [self._summed], self._came)

    def end(self, norm: GradientNorm) -> None:
        """Add them to ``norm``, when they have come."""
        self._wait()
        norm.add_words(self._here)

    def _wait(self) -> None:
        self._came.synchronize()
