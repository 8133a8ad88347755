"""Communicator: collectives and messages of the job's ranks on torch tensors.

A tensor or a list of tensors is one operation. Collectives of one communicator run in call order (a blocking one on
the calling thread, an asynchronous one on the communicator's own), and every rank must issue them in the same order;
before bytes move, the ranks compare what they called. Any thread may call, as long as that order holds.
Tensors from ``empty`` lie in symmetric memory (every rank has it mapped): collectives on them copy nothing.
Source: owner-computes reduction, docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zcomm import _core
from zcomm._calls import Buckets
from zcomm._messages import Messages
from zcomm._movements import Movements
from zcomm._reductions import Reductions
from zcomm._tensors import core_dtype, tensor_of

__all__ = ["Buckets", "Communicator"]


class Communicator(Reductions, Movements, Messages):
    """The ranks of a job, in a fixed order. Made by ``zcomm.init``; ``duplicate`` and ``split`` make further ones."""

    def __init__(self, core: _core.Communicator, mesh: _core.Mesh, local_rank: int) -> None:
        super().__init__(core)
        self._mesh = mesh
        self.rank: int = core.rank
        self.world_size: int = core.world_size
        self.local_rank = local_rank
        self.local_world_size: int = core.world_size

    # --- memory -----------------------------------------------------------------------------------------------

    def empty(self, n: int, dtype: torch.dtype = torch.float32, device: str | None = "cpu") -> torch.Tensor:
        """A flat symmetric tensor of ``n`` elements, zero-filled. Collective: same n on each rank."""
        return self._allocated(n, dtype, device, shared=False)

    def shared_empty(self, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A flat tensor of ``n`` elements that all ranks of the host share: one memory, zero-filled. Collective."""
        return self._allocated(n, dtype, "cpu", shared=True)

    def _allocated(self, n: int, dtype: torch.dtype, device: str | None, shared: bool) -> torch.Tensor:
        if n < 0:
            raise ValueError(f"empty: n={n} is negative")
        if torch.device(device or "cpu").type != "cpu":
            raise NotImplementedError(f"empty: device={device!r}; this build has symmetric memory on the CPU only")
        core_dtype(dtype)
        allocate = self._core.allocate_shared if shared else self._core.allocate
        return tensor_of(allocate(n * dtype.itemsize), dtype, n)

    def memory(self) -> dict[str, int]:
        """Bytes that this communicator holds on this rank, by kind, and how many allocations it ever made."""
        return dict(self._core.memory())

    # --- life -------------------------------------------------------------------------------------------------

    def duplicate(self) -> Communicator:
        """A second communicator of the same ranks with its own order of calls. Collective."""
        return Communicator(self._core.duplicate(), self._mesh, self.local_rank)

    @contextmanager
    def no_deadline(self) -> Iterator[None]:
        """While inside, nobody who waits for this rank runs into the deadline: for slow set-up by one rank.

        A rank that dies is still noticed. Blocks nest. Raises: RuntimeError on a closed or failed communicator.
        """
        self._core.suspend_deadline()
        try:
            yield
        finally:
            self._core.resume_deadline()

    def close(self) -> None:
        """End pending operations with an error and free everything. Idempotent; not collective."""
        self._core.close()
