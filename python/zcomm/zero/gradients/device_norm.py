"""Squares of gradients on a device, which adds them up: 560 bytes are copied to the host.

Kernels on torch's stream add the squares of every shard to the words of an exact sum ([Note: gradient norm]). The
lane's ``h2d`` stream copies the words to the host, past the gradients in flight. The sum is exact, so the bits of the
norm are the CPU's.

[Note: squares before the gradients] In a world of one the device slots have all gradients of a single pass. So their
squares are summed on the device, before each bucket's copy. The norm is known when backward ends on the device, while
gradients are still in flight, and the host does not read them twice. Sums on the device ([Note: sums on a device]) are
squared in the last pass that the step expects, before each bucket's copy. Otherwise, after a second pass, or a gradient
that was set from outside, only the host has the sums; it squares them.
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
    """A sum of squares: ``begin``, any number of ``add``, ``send``, and then any number of ``end``."""

    def __init__(self, lane: DeviceLane, arena: _core.PinnedArena) -> None:
        words = _core.EXACT_SUM_WORDS
        self._lane = lane
        self._there = lane.empty(words, torch.int64, "a sum of squares")
        self._here = tensor_of(arena.allocate(8 * words), torch.int64)[:words]
        self._summed = lane.event()
        self._ready = lane.event()

    def begin(self) -> None:
        """Make the sum zero. Does not synchronise."""
        stream = self._lane.current()
        for event in (self._summed, self._ready):
            stream.wait(event)
        stream.fill(self._there.data_ptr(), 0, self._there.nbytes)
        stream.record(self._summed)

    def add(self, shard: torch.Tensor, after: Iterable[Any] = ()) -> Any:
        """Square a flat gradient, once the events ``after`` are recorded. Returns the event behind it. Does not
        synchronise."""
        stream = self._lane.current()
        for event in (self._summed, *after):
            stream.wait(event)
        words = self._there.data_ptr()
        _core.stream_norm(stream, words, shard.data_ptr(), core_dtype(shard.dtype), shard.numel())
        stream.record(self._summed)
        return self._summed

    def send(self) -> None:
        """Start the copy of the sum to the host. Does not synchronise."""
        self._lane.h2d.copy([(self._here, self._there)], [self._summed], self._ready)

    def end(self, norm: GradientNorm) -> None:
        """Add the sum to ``norm``. Waits until it is on the host."""
        self._wait()
        norm.squares.add_words(self._here)

    def _wait(self) -> None:
        self._lane.passes(self._ready)  # if not, the ranks' sum of these names the lost rank


class NoSquares:
    """The null object: the host squares the sums. known: always False."""

    known = False

    def begin_pass(self, fresh: bool, last: bool) -> None:
        """Begin a pass. fresh: its gradients overwrite the accumulators. last: the step expects no other one after
        it."""

    def add(self, slot: torch.Tensor, written: list[Any]) -> list[Any]:
        """Square a slot, or a sum, behind the events ``written``. Returns the events that its copy to the host waits
        for."""
        return written

    def end_pass(self) -> None:
        """End a pass."""

    def forget(self) -> None:
        """Leave the norm to the host, because the sums differ from the pass's."""

    def send(self) -> None:
        """Start the copy of the squares to the host."""

    def end(self, norm: GradientNorm) -> None:
        """Add the squares to ``norm``."""
        raise NotImplementedError("the host squares the sums")


class PassSquares(NoSquares):
    """Squares of the gradients of a step in a world of one ([Note: squares before the gradients]).

    of_sums: ``add`` takes sums of all passes so far, otherwise slots.
    known: they are the squares of all gradients that left the device since they were forgotten.
    """

    def __init__(self, squares: DeviceSquares, of_sums: bool = False) -> None:
        self._squares, self._of_sums = squares, of_sums
        self._wanted = self._begun = self.known = False

    def begin_pass(self, fresh: bool, last: bool) -> None:
        self._wanted, self._begun, self.known = last and (fresh or self._of_sums), False, False

    def add(self, slot: torch.Tensor, written: list[Any]) -> list[Any]:
        if not self._wanted:
            return written
        if not self._begun:
            self._begun = True
            self._squares.begin()
        return [self._squares.add(slot, written)]

    def end_pass(self) -> None:
        self.known = self._wanted

    def forget(self) -> None:
        self.known = False

    def send(self) -> None:
        if self.known:
            self._squares.send()

    def end(self, norm: GradientNorm) -> None:
        self._squares.end(norm)
