"""The global gradient norm, with bits that do not depend on how gradients are sharded ([Note: gradient norm]).

On a device kernels on torch's stream add the squares of every shard to the words of an exact sum. The lane's ``h2d``
stream copies these 560 bytes to the host, past the gradients in flight. The sum is exact: the norm has the CPU's bits.

[Note: squares before the gradients] In a world of one the device slots have all gradients of a single pass. So their
squares are summed on the device, before each bucket's copy. The norm is known when backward ends on the device, while
gradients are still in flight, and the host does not read them twice. Sums on the device ([Note: sums on a device]) are
squared in the last pass that the step expects, before each bucket's copy. Otherwise, after a second pass, or a gradient
that was set from outside, only the host has the sums; it squares them.
Thread rule: one thread at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype, tensor_of
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.layout.flat import FlatBucket


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor for gradients of this norm, as torch's clip_grad_norm_ computes it: a NaN stays a NaN."""
    factor = limit / (norm + 1e-6)
    return factor if not factor >= 1.0 else 1.0


class Squares:
    """Exact sums of squares of gradients: of elements that this rank counts, and of copies that another rank counts.

    Of copies only the number of terms that are not finite is used. So an error in one copy is seen by all ranks.
    """

    def __init__(self) -> None:
        self.counted, self._copies = _core.ExactSum(), _core.ExactSum()
        self.words = torch.from_numpy(np.asarray(self.counted))
        self._copied = torch.from_numpy(np.asarray(self._copies))

    def of(self, bucket: FlatBucket) -> _core.ExactSum:
        """Return the sum to which the squares of this rank's shard of ``bucket`` are added."""
        return self.counted if bucket.counted else self._copies

    def add(self, bucket: FlatBucket, shard: torch.Tensor) -> None:
        """Add this rank's shard of ``bucket``; in any order."""
        self.of(bucket).add_squares(shard.data_ptr(), core_dtype(shard.dtype), shard.numel())

    def add_words(self, words: torch.Tensor, counted: bool = True) -> None:
        """Add the words of another sum, on the host, int64: of counted elements, or of copies."""
        _core.add_words(self.counted if counted else self._copies, words.data_ptr())

    def end(self) -> torch.Tensor:
        """Return the words, ready to be added to others: of counted elements, and the non-finite terms of all."""
        self.counted.normalize()
        self.words[-1] += self._copied[-1]
        self._copies.clear()
        return self.words

    def clear(self) -> None:
        self.counted.clear()
        self._copies.clear()


class GradientNorm:
    """Exact sum of squares of all ranks' shards, each element counted once; one small integer all_reduce of all ranks,
    which is also a barrier.

    squares: of this rank's, for kernels that add squares while they read the gradients.
    flagged, edited, differs: see ``end``.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.flagged = self.edited = self.differs = False
        self.squares = Squares()
        self._message = torch.zeros(self.squares.words.numel() + 3, dtype=torch.int64)

    def begin(self) -> None:
        """Make the sum zero."""
        self.squares.clear()

    def all_reduce_flag(self, flag: bool, word: int) -> None:
        """Send the message of ``end`` without squares, so that ranks that compute the norm now find this rank's options
        to differ. Collective."""
        self.begin()
        self.end(flag, word)

    def end(self, flag: bool = False, word: int = 0, edited: bool = False) -> float:
        """Return the norm of the sums of all ranks. Collective.

        ``flagged`` and ``edited`` are then True if any rank's argument was, ``differs`` if the ranks' words do not add
        up to 0.
        With world_size 1 the all_reduce is skipped: it would queue behind pending reductions of gradients.
        """
        words = self.squares.end()
        self.flagged, self.edited = flag, edited
        if self._comm.world_size > 1:
            self._message[:-3].copy_(words)
            self._message[-3], self._message[-2], self._message[-1] = int(flag), int(edited), word
            self._comm.all_reduce(self._message, name="gradient norm")
            words.copy_(self._message[:-3])
            self.flagged, self.edited, self.differs = map(bool, self._message[-3:].tolist())
        return math.sqrt(self.squares.counted.value())


class DeviceSquares:
    """A sum of squares, of elements that this rank counts, or of copies: ``begin``, any number of ``add``, ``send``,
    and then any number of ``end``."""

    def __init__(self, lane: DeviceLane, arena: _core.PinnedArena, counted: bool = True) -> None:
        words = _core.EXACT_SUM_WORDS
        self._lane, self._counted = lane, counted
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
        norm.squares.add_words(self._here, self._counted)

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
