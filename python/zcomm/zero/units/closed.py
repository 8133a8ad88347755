"""ClosedShards: this rank's shards of a closed optimizer's parameters, until another optimizer takes these over.

No rank has the whole values, and ``close()`` waits for no other rank. So each rank keeps its own shard, and the next
construction, which is collective, reads the values from all of them.
Memory: the shards, freed with the last parameter that has its value there.
Thread rule: the main thread.
"""

from __future__ import annotations

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import Geometry


class ClosedShards:
    """The shards by bucket. age: equal on ranks that closed after the same steps and changes."""

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        rank: int,
        world_size: int,
        shards: dict[int, torch.Tensor],
        age: str,
    ) -> None:
        self._geometry, self._dtype, self._shards, self.age = geometry, dtype, shards, age
        self._rank, self._world_size = rank, world_size
        self._needed = {bucket.index: set(bucket.params) for bucket in geometry.every}

    def value(self, number: int) -> ClosedValue | None:
        """Return the value of parameter ``number``; None after ``drop``."""
        spans = self._geometry.spans(number)
        return ClosedValue(self, number) if all(number in self._needed[span.bucket] for span in spans) else None

    def drop(self, number: int) -> None:
        """Let the parameter have no value here any more."""
        for span in self._geometry.spans(number):
            self._needed[span.bucket].discard(number)
            if not self._needed[span.bucket]:
                self._shards.pop(span.bucket, None)

    def shape(self, number: int) -> torch.Size:
        return self._geometry.places[number].shape

    def read(self, comm: Communicator, number: int, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of a parameter. Collective. Raises: ValueError for other ranks."""
        if (comm.rank, comm.world_size) != (self._rank, self._world_size):
            raise ValueError(
                f"{name} is in shards of {self._world_size} ranks of a closed ZeroOptimizer, but the new one's "
                f"communicator has {comm.world_size}: use the same ranks, or load the weights"
            )
        out = torch.empty(end - begin, dtype=self._dtype)
        for span in self._geometry.spans(number):
            low, high = max(begin, span.begin), min(end, span.begin + span.count)
            shift, size = span.offset - span.begin, self._geometry.every[span.bucket].shard_count
            while low < high:
                rank, inside = divmod(low + shift, size)
                stop = min(high, low + size - inside)
                piece = out[low - begin : stop - begin]
                if rank == self._rank:
                    piece.copy_(self._shards[span.bucket][inside : inside + stop - low])
                comm.broadcast(piece, root=rank, name=f"value of {name}")
                low = stop
        return out


class ClosedValue:
    """The value of one parameter."""

    def __init__(self, shards: ClosedShards, number: int) -> None:
        self._shards, self._number, self.age = shards, number, shards.age

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end). Collective. Raises: as ``ClosedShards.read``."""
        return self._shards.read(comm, self._number, name, begin, end)

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Collective. Raises: as ``read``."""
        shape = self._shards.shape(self._number)
        return self.read(comm, name, 0, shape.numel()).view(shape)
