"""The global gradient norm, with bits that do not depend on how gradients are sharded ([Note: gradient norm])."""

from __future__ import annotations

import math

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype
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

    def add_words(self, words: torch.Tensor) -> None:
        """Add the words of another sum of counted elements, on the host, int64."""
        _core.add_words(self.counted, words.data_ptr())

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
