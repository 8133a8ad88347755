"""Part: this rank's elements of a value that was set before ZeroOptimizer (``from_pretrained`` under ``zero.Init``).

A model that is loaded module by module is never whole on a rank, because each rank keeps its share of each parameter.
Memory: the share, in pages of its own. ``gather`` allocates the whole value, ``read`` a piece. Both are collective.
Thread rule: the main thread.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import from_root
from zcomm.zero.materialize.replay import empty_pages, pages


class Part:
    """The elements of ``value``, the same on each rank, that rank ``rank`` of ``world_size`` keeps."""

    def __init__(self, value: torch.Tensor, rank: int, world_size: int) -> None:
        self._shape, self._dtype, self._world_size = value.shape, value.dtype, world_size
        octets = value.detach().contiguous().reshape(-1).view(torch.uint8)
        self._nbytes = octets.numel()
        size = -(-self._nbytes // world_size)
        mine = octets[rank * size : (rank + 1) * size]
        self._octets = torch.empty(0, dtype=torch.uint8).set_(pages(size), 0, (size,), (1,))  # zeros at the end
        self._octets[: mine.numel()].copy_(mine)

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Raises: ValueError if ``comm`` has other ranks than the parts."""
        self._check(comm, name)
        whole = comm.all_gather(self._octets, name=f"value of {name}")
        assert isinstance(whole, torch.Tensor)
        return whole[: self._nbytes].view(self._dtype).view(self._shape)

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Raises: as ``gather``."""
        self._check(comm, name)
        out = torch.empty(end - begin, dtype=self._dtype)
        octets, size = out.view(torch.uint8), self._octets.numel()
        first, last = begin * out.itemsize, end * out.itemsize
        for rank in range(first // size, -(-last // size)):
            low, high = max(first, rank * size), min(last, (rank + 1) * size)
            piece = octets[low - first : high - first]
            if comm.rank == rank:
                piece.copy_(self._octets[low - rank * size : high - rank * size])
            comm.broadcast(piece, root=rank, name=f"value of {name}")
        return out

    def _check(self, comm: Communicator, name: str) -> None:
        _check(comm, self._world_size, name)


class RootValue:
    """The value of ``param`` that rank ``root`` reads from a file, without memory. read: None on the other ranks."""

    def __init__(
        self, param: torch.Tensor, read: Callable[[int, int], torch.Tensor] | None, root: int, world_size: int
    ) -> None:
        self._shape, self._dtype = param.shape, param.dtype
        self._read, self._root, self._world_size = read, root, world_size

    def gather(self, comm: Communicator, name: str) -> torch.Tensor:
        """Return the whole value. Raises: as ``read``."""
        return self.read(comm, name, 0, self._shape.numel()).view(self._shape)

    def read(self, comm: Communicator, name: str, begin: int, end: int) -> torch.Tensor:
        """Return flat elements [begin, end) of the whole value. Collective. Raises: ValueError if ``comm`` has other
        ranks; OSError on all ranks, with the same text, if the file cannot be read."""
        _check(comm, self._world_size, name)
        out = from_root(comm, self._root, f"reading {name}", lambda: self._read(begin, end))  # type: ignore[misc]
        if out is None:
            # Not from the heap, because each freed piece would leave a hole that is too small for the next.
            out = empty_pages(end - begin, self._dtype)
        comm.broadcast(out, root=self._root, name=f"value of {name}")
        return out


def _check(comm: Communicator, world_size: int, name: str) -> None:
    if comm.world_size != world_size:
        raise ValueError(
            f"{name} was set inside of zcomm.zero.Init() by {world_size} ranks, which have a part each, but "
            f"ZeroOptimizer's communicator has {comm.world_size}: use the job's"
        )
