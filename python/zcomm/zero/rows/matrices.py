"""Matrices: single matrices of weights with three dimensions, gathered as the program indexes them (``w[i]``).

A program may name its next matrices (``expect``), and up to AHEAD of them are read ahead. A matrix keeps its
memory, which is filled again only after all views have died. It is a tensor of inference, so that a write to it
raises an error instead of being lost.
One rank only, because ranks with other tokens index other matrices.
Thread rule: as UnitManager; ``_fill`` on the gathering thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.span_cache import whole_pages
from zcomm.zero.rows.blocks import block_slots, row_width
from zcomm.zero.rows.weight import Gather, Part, RowWeight
from zcomm.zero.worker import Call

AHEAD = 2


class _Memory:
    """Memory of one matrix. user: the storage of the tensor that was given out last."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.user: StorageWeakRef | None = None

    def give(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode():
            made = tensor_of(self.memory, dtype, torch.Size(shape).numel())
            self.user = StorageWeakRef(made.untyped_storage())
            return made.view(*shape)


class Matrices:
    """The matrices of ``weights``. Memory: MATRICES of the largest; more while the program keeps more."""

    def __init__(self, weights: Sequence[RowWeight], dtype: torch.dtype, gather: Gather) -> None:
        self._dtype, self._gather = dtype, gather
        sizes = block_slots(weight.shape for weight in weights if len(weight.shape) == 3)
        self._nbytes = whole_pages(sizes * dtype.itemsize)
        self._memories: list[_Memory] = []
        self._expected: deque[tuple[RowWeight, int]] = deque()
        self._coming: deque[tuple[tuple[int, int, int], torch.Tensor, Call[None]]] = deque()

    def expect(self, wanted: Sequence[tuple[RowWeight, int]], edits: int) -> None:
        """Read the matrices ``wanted`` ahead, in their order, in place of those that were expected before.

        edits: changes of weights by the program so far.
        """
        self.settle()
        self._expected.extend(wanted)
        self._read_ahead(edits)

    def take(self, weight: RowWeight, number: int, edits: int) -> torch.Tensor:
        """Return a matrix. Raises: OSError."""
        wanted = (weight.index, number, edits)
        if not self._coming or self._coming[0][0] != wanted:
            self.settle()
            self._start(weight, number, edits)
        _, found, call = self._coming.popleft()
        self._read_ahead(edits)
        call.result()
        return found

    def _read_ahead(self, edits: int) -> None:
        while self._expected and len(self._coming) < AHEAD:
            self._start(*self._expected.popleft(), edits)

    def _start(self, weight: RowWeight, number: int, edits: int) -> None:
        memory, width = self._free(), row_width(weight.shape)
        found = memory.give(weight.shape[1:], self._dtype)
        name, out = f"matrix {number} of {weight.name}", tensor_of(memory.memory, self._dtype, width)
        call = self._gather.submit(self._fill, name, weight.parts(number * width, (number + 1) * width), out)
        self._coming.append(((weight.index, number, edits), found, call))

    def _fill(self, name: str, parts: Sequence[Part], out: torch.Tensor) -> None:
        for bucket, part, into in parts:
            self._gather.fill_part(name, bucket, part, out[into])

    def _free(self) -> _Memory:
        for memory in self._memories:
            if memory.user is None or memory.user.expired():
                return memory
        self._memories.append(_Memory(self._gather.allocate(self._nbytes)))
        return self._memories[-1]

    def settle(self) -> None:
        """Wait for the matrices that are read ahead, and forget them: an error or an edit has changed the order."""
        self._expected.clear()
        while self._coming:
            with suppress(Exception):  # the next read raises it again
                self._coming.popleft()[-1].result()

    @property
    def nbytes(self) -> int:
        return sum(each.memory.nbytes for each in self._memories)

    def close(self) -> None:
        self._expected.clear()
        self._coming.clear()
        self._memories.clear()
