"""Replay: the value of a deferred tensor, from its first element to its last, piece by piece.

[Note: draws by pieces] torch fills contiguous memory with random numbers from front to back, 16 elements at a time. At
the end it draws the last 16 again. So draws into pieces give the bits of one draw, if pieces have multiples of 16
elements, and the last one at least 16. That is compared once per operation and dtype. If it does not hold, the whole
tensor is drawn at once. The other known operations change each element independently.
Memory: one piece.
"""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

PIECE_COUNT = 1 << 20  # elements; a multiple of _UNIT
_UNIT = 16
_aten = torch.ops.aten
_DRAWS = (_aten.normal_.default, _aten.uniform_.default)
_ALONE = (_aten.zero_.default, _aten.fill_.Scalar, _aten.mul_.Tensor)  # elementwise: same bits for any cut


def pages(nbytes: int) -> torch.UntypedStorage:
    """Allocate zeros that return to the system when freed, because malloc would keep holes between live blocks."""
    return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8).untyped_storage()


def empty_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``count`` zeros in separate pages (``pages``)."""
    return torch.empty(0, dtype=dtype).set_(pages(count * dtype.itemsize), 0, (count,), (1,))


def cut(count: int, step: int = 0) -> Iterator[slice]:
    """Yield the pieces of ``count`` elements. step: of a test."""
    step = step or PIECE_COUNT
    begin = 0
    while count - begin >= step + _UNIT:
        yield slice(begin, begin + step)
        begin += step
    yield slice(begin, count)


@functools.cache
def draws_by_pieces(func: Any, dtype: torch.dtype) -> bool:
    """Return True if ``func`` in pieces gives the same bits and the same final state of the generator."""
    if func not in _DRAWS:
        return False
    values, states = [], []
    for step in (1 << 10, 4 * _UNIT):
        generator, value = torch.Generator().manual_seed(1), torch.empty(5 * _UNIT + 3, dtype=dtype)
        for piece in cut(value.numel(), step):
            func(value[piece], generator=generator)
        values.append(value.view(torch.uint8))
        states.append(generator.get_state())
    return torch.equal(*values) and torch.equal(*states)


def spend(func: Any, written: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Advance the generator as ``func(written, *args, **kwargs)`` would, with one piece of memory. ``written`` may be
    on the meta device. Return False, and do nothing, if that is not known to give the same state."""
    if not written.is_contiguous() or not draws_by_pieces(func, written.dtype):
        return False
    count = written.numel()
    memory = empty_pages(min(count, PIECE_COUNT + _UNIT), written.dtype)
    for piece in cut(count):
        func(memory[: piece.stop - piece.start], *args, **kwargs)
    return True


class Step:
    """An operation of a recipe on elements [begin, end) of a tensor, which are contiguous.

    state: of the generator before a random operation. end: None for the last element.
    """

    def __init__(self, func: Any, begin: int, end: int, args: tuple[Any, ...], state: torch.Tensor | None) -> None:
        self._func, self._begin, self._end, self._args = func, begin, end, args
        self._options: dict[str, Any] = {}
        if state is not None:
            self._options["generator"] = torch.Generator()
            self._options["generator"].set_state(state)

    @staticmethod
    def known(func: Any, args: Sequence[Any], dtype: torch.dtype, whole: bool) -> bool:
        """Return True if ``func(tensor, *args)`` can be cut. whole: it changes all elements."""
        if not all(isinstance(each, (int, float)) for each in args):
            return False
        return func in _ALONE or (whole and draws_by_pieces(func, dtype))

    def run(self, memory: torch.Tensor, at: int) -> None:
        """Change ``memory``, the elements from ``at`` on."""
        low, high = max(self._begin, at), min(self._end, at + memory.numel())
        if low < high:
            self._func(memory[low - at : high - at], *self._args, **self._options)


class CopyStep:
    """A copy of the elements from ``read`` into contiguous elements [begin, end) of a tensor, from front to back."""

    def __init__(self, read: Callable[[int, int], torch.Tensor], begin: int, end: int) -> None:
        self._read, self._begin, self._end = read, begin, end

    def run(self, memory: torch.Tensor, at: int) -> None:
        """Change ``memory``, the elements from ``at`` on."""
        low, high = max(self._begin, at), min(self._end, at + memory.numel())
        if low < high:
            memory[low - at : high - at].copy_(self._read(low - self._begin, high - self._begin))


class Replay:
    """A tensor of zeros that ``steps`` change, in ``dtype``; ``read`` goes from front to back."""

    def __init__(self, count: int, dtype: torch.dtype, steps: Sequence[Step | CopyStep]) -> None:
        self._steps = steps
        self._cuts = cut(count)
        self._memory = empty_pages(min(count, PIECE_COUNT + _UNIT), dtype)
        self._piece = slice(0, 0)  # elements of ``_memory``

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return elements [begin, end), until the next call. ``begin`` never goes back."""
        found: list[torch.Tensor] = []
        while begin < end:
            if begin >= self._piece.stop:
                found = [part.clone() for part in found]  # because the next piece overwrites their memory
                self._make(next(self._cuts))
                continue
            assert begin >= self._piece.start, "pieces are read from front to back"
            stop = min(end, self._piece.stop)
            found.append(self._memory[begin - self._piece.start : stop - self._piece.start])
            begin = stop
        return found[0] if len(found) == 1 else torch.cat(found)

    def _make(self, piece: slice) -> None:
        memory = self._memory[: piece.stop - piece.start].zero_()
        for step in self._steps:
            step.run(memory, piece.start)
        self._piece = piece


def contiguous(size: torch.Size, stride: Sequence[int]) -> bool:
    """Return True if elements of such a view follow each other in memory."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return math.prod(size) > 0
