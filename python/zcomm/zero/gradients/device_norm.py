"""Squares of gradients on a device: they are added up there, and 560 bytes come to the host.

Kernels on torch's stream add the squares of every shard to the words of an exact sum ([Note: gradient norm]), which the
lane's ``back`` brings, past the gradients that are on their way to the host; exact, so the norm's bits are the CPU's.
Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import core_dtype, tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.gradients.norm import GradientNorm


class DeviceSquares:
    """A round: ``begin``, ``add`` as often as you like, ``send``, and then ``end``, as often as you like."""

    def __init__(self, lane: DeviceLane, arena: _core.PinnedArena) -> None:
        words = _core.EXACT_SUM_WORDS
        self._lane = lane
        self._there = lane.empty(words, torch.int64, "a sum of squares")
        self._here = tensor_of(arena.allocate(8 * words), torch.int64)[:words]
        self._summed = lane.event()
        self._came = lane.event()

    def begin(self) -> None:
        """The sum is zero; nobody waits."""
        stream = self._lane.current()
        for event in (self._summed, self._came):
            stream.wait(event)
        stream.fill(self._there.data_ptr(), 0, self._there.nbytes)
        stream.record(self._summed)

    def add(self, shard: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Square a flat gradient, once the events ``after`` have passed; nobody waits. Returns the event behind it."""
        stream = self._lane.current()
        for event in (self._summed, *after):
            stream.wait(event)
        words = self._there.data_ptr()
        _core.stream_norm(stream, words, shard.data_ptr(), core_dtype(shard.dtype), shard.numel())
        stream.record(self._summed)
        return self._summed

    def send(self) -> None:
        """That was all; nobody waits."""
        self._lane.back.carry([(self._here, self._there)], [self._summed], self._came)

    def end(self, norm: GradientNorm) -> None:
        """Add them to ``norm``, when they have come."""
        self._wait()
        norm.add_words(self._here)

    def _wait(self) -> None:
        self._lane.passes(self._came)  # if not, the ranks' sum of these says who is gone
