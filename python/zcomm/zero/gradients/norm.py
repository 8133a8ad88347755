"""The global gradient norm, with bits that do not depend on how gradients are sharded ([Note: gradient norm])."""

from __future__ import annotations

import math

import numpy as np
import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import core_dtype


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor for gradients of this norm, as torch's clip_grad_norm_ computes it: a NaN stays a NaN."""
    factor = limit / (norm + 1e-6)
    return factor if not factor >= 1.0 else 1.0


class GradientNorm:
    """Exact sum of squares of all ranks' shards; one small integer all_reduce, which is also a barrier.

    sum: of this rank's, for kernels that add squares while they read the gradients.
    flagged, edited, differs: see ``end``.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.flagged = self.edited = self.differs = False
        self.sum = _core.ExactSum()
        self._words = torch.from_numpy(np.asarray(self.sum))
        self._message = torch.zeros(self._words.numel() + 3, dtype=torch.int64)

    def begin(self) -> None:
        """Make the sum zero."""
        self.sum.clear()

    def add(self, shard: torch.Tensor) -> None:
        """Add one more shard; in any order."""
        self.sum.add_squares(shard.data_ptr(), core_dtype(shard.dtype), shard.numel())

    def add_words(self, words: torch.Tensor) -> None:
        """Add the words of another sum, on the host, int64."""
        _core.add_words(self.sum, words.data_ptr())

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
        self.sum.normalize()
        self.flagged, self.edited = flag, edited
        if self._comm.world_size == 1:
            return math.sqrt(self.sum.value())
        self._message[:-3].copy_(self._words)
        self._message[-3], self._message[-2], self._message[-1] = int(flag), int(edited), word
        self._comm.all_reduce(self._message, name="gradient norm")
        self._words.copy_(self._message[:-3])
        self.flagged, self.edited, self.differs = map(bool, self._message[-3:].tolist())
        return math.sqrt(self.sum.value())
