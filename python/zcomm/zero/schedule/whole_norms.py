"""WholeNorms: norms over whole parameters, which ranks have in parts, for a rule that has ``sums``.

The sums of squares are exact ([Note: gradient norm]), so the norms do not depend on the boundaries of shards. The host
or the device adds them up, next to the parts. One integer all_reduce adds the sums of all ranks.
Thread rule: the main thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
from zcomm.memory.device_streams import Lane

Norms = tuple[float, ...]


class WholeNorms:
    """``sums`` norms of each of ``params`` parameters. Memory: 560 bytes for each."""

    def __init__(self, comm: Communicator, params: int, sums: int, lane: Lane) -> None:
        self._comm, self._sums, self._lane = comm, sums, lane
        self._host = [_core.ExactSum() for _ in range(params * sums)]
        self._there: torch.Tensor | None = None  # words of the sums on the device; made by the first

    def begin(self) -> None:
        """Make all sums zero."""
        for each in self._host:
            each.clear()
        if self._there is not None:
            self._there.zero_()

    def add(self, param: int, terms: Sequence[torch.Tensor]) -> None:
        """Add the squares of ``terms``, flat in host memory, to the sums of a parameter."""
        for number, term in enumerate(terms, param * self._sums):
            self._host[number].add_squares(term.data_ptr(), core_dtype(term.dtype), term.numel())

    def add_on(self, stream: Any, param: int, terms: Sequence[torch.Tensor]) -> None:
        """Queue the same on torch's ``stream``, for terms in the device's memory."""
        if self._there is None:
            count = len(self._host) * _core.EXACT_SUM_WORDS
            self._there = self._lane.empty(count, torch.int64, "sums of squares").zero_()
        for number, term in enumerate(terms, param * self._sums):
            words = self._there.data_ptr() + 8 * _core.EXACT_SUM_WORDS * number
            _core.stream_norm(stream, words, term.data_ptr(), core_dtype(term.dtype), term.numel())

    def end(self) -> list[Norms]:
        """Return the norms of each parameter. Collective: adds the sums of all ranks."""
        if self._there is not None:
            there = self._there.to("cpu").view(-1, _core.EXACT_SUM_WORDS)
            for each, words in zip(self._host, there, strict=True):
                _core.add_words(each, words.data_ptr())
        for each in self._host:
            each.normalize()
        views = [torch.from_numpy(np.asarray(each)) for each in self._host]
        message = torch.stack(views)
        self._comm.all_reduce(message, name="norms of whole parameters")
        for view, words in zip(views, message, strict=True):
            view.copy_(words)
        values = [math.sqrt(each.value()) for each in self._host]
        return [tuple(values[at : at + self._sums]) for at in range(0, len(values), self._sums)]
