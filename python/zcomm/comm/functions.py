"""The collectives as module functions: each is the method of the same name of the default communicator."""

from __future__ import annotations

from typing import Any

import torch

from zcomm.comm.communicator import Buckets
from zcomm.comm.job import current
from zcomm.comm.work import Work


def rank() -> int:
    """This process's rank in the job."""
    return current().rank


def world_size() -> int:
    """Number of ranks of the job."""
    return current().world_size


def local_rank() -> int:
    """This process's rank among those of its host."""
    return current().local_rank


def all_reduce(buckets: Buckets, op: str = "sum", async_op: bool = False, **options: Any) -> Work | None:
    """Reduce in place over all ranks; see ``Communicator.all_reduce``."""
    if async_op:
        return current().all_reduce(buckets, op, async_op=True, **options)
    current().all_reduce(buckets, op, **options)
    return None


def reduce_scatter(
    buckets: Buckets, op: str = "sum", out: Buckets | None = None, async_op: bool = False, **options: Any
) -> Buckets | tuple[Buckets, Work]:
    """Reduce, and keep this rank's part; see ``Communicator.reduce_scatter``."""
    return current().reduce_scatter(buckets, op, out, async_op, **options)


def all_gather(
    shards: Buckets, out: Buckets | None = None, async_op: bool = False, **options: Any
) -> Buckets | tuple[Buckets, Work]:
    """Put the shards of all ranks together; see ``Communicator.all_gather``."""
    return current().all_gather(shards, out, async_op, **options)


def broadcast(buckets: Buckets, root: int = 0, async_op: bool = False, **options: Any) -> Work | None:
    """Copy root's buckets into everybody's; see ``Communicator.broadcast``."""
    return current().broadcast(buckets, root, async_op, **options)


def reduce(buckets: Buckets, root: int = 0, op: str = "sum", async_op: bool = False, **options: Any) -> Work | None:
    """Reduce into root's buckets; see ``Communicator.reduce``."""
    return current().reduce(buckets, root, op, async_op, **options)


def gather(
    shards: Buckets, root: int = 0, out: Buckets | None = None, async_op: bool = False, **options: Any
) -> Buckets | tuple[Buckets | None, Work] | None:
    """Put the shards of all ranks together at root; see ``Communicator.gather``."""
    return current().gather(shards, root, out, async_op, **options)


def scatter(out: Buckets, buckets: Buckets | None = None, root: int = 0, async_op: bool = False, **options: Any) -> Any:
    """Deal root's buckets to all ranks; see ``Communicator.scatter``."""
    return current().scatter(out, buckets, root, async_op, **options)


def all_to_all(out: Buckets, inp: Buckets, async_op: bool = False, **options: Any) -> Work | None:
    """A part for each rank, a part from each rank; see ``Communicator.all_to_all``."""
    return current().all_to_all(out, inp, async_op, **options)


def send(buckets: Buckets, dst: int, tag: int = 0, async_op: bool = False) -> Work | None:
    """Send to one rank; see ``Communicator.send``."""
    return current().send(buckets, dst, tag, async_op)


def recv(buckets: Buckets, src: int | None = None, tag: int = 0, async_op: bool = False) -> int | Work:
    """Receive from one rank; see ``Communicator.recv``."""
    return current().recv(buckets, src, tag, async_op)


def barrier(async_op: bool = False) -> Work | None:
    """Wait until every rank has called it."""
    return current().barrier(async_op=async_op)


def empty(n: int, dtype: torch.dtype = torch.float32, device: str | None = None) -> torch.Tensor:
    """A flat symmetric tensor of ``n`` elements; see ``Communicator.empty``."""
    return current().empty(n, dtype, device)
