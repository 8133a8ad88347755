"""The collectives as module functions: each is the method of the same name of the default communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from zcomm.comm.calls import Op
from zcomm.comm.codec import Codec, Coded, Errors
from zcomm.comm.communicator import Buckets
from zcomm.comm.job import current
from zcomm.comm.p2p import RecvWork
from zcomm.comm.work import Work

if TYPE_CHECKING:
    from typing_extensions import Unpack


def rank() -> int:
    """Return this process's rank in the job."""
    return current().rank


def world_size() -> int:
    """Return the number of ranks of the job."""
    return current().world_size


def local_rank() -> int:
    """Return this process's rank among the ranks of its host."""
    return current().local_rank


@overload
def all_reduce(
    buckets: Buckets,
    op: Op = ...,
    async_op: Literal[False] = ...,
    *,
    name: str = ...,
    order: str = ...,
    **coded: Unpack[Coded],
) -> None: ...
@overload
def all_reduce(
    buckets: Buckets,
    op: Op = ...,
    *,
    async_op: Literal[True],
    name: str = ...,
    order: str = ...,
    **coded: Unpack[Coded],
) -> Work: ...
@overload
def all_reduce(
    buckets: Buckets, op: Op = ..., async_op: bool = ..., *, name: str = ..., order: str = ..., **coded: Unpack[Coded]
) -> Work | None: ...


def all_reduce(
    buckets: Buckets,
    op: Op = "sum",
    async_op: bool = False,
    *,
    name: str = "",
    order: str = "any",
    codec: Codec | str | None = None,
    error: tuple[Errors, Errors] | None = None,
    keep: float = 0.0,
    mask: Errors | None = None,
) -> Work | None:
    """Reduce in place over all ranks; see ``Communicator.all_reduce``."""
    return current().all_reduce(
        buckets, op, async_op, name=name, order=order, codec=codec, error=error, keep=keep, mask=mask
    )


def reduce_scatter(
    buckets: Buckets,
    op: Op = "sum",
    out: Buckets | None = None,
    async_op: bool = False,
    *,
    accumulate: bool = False,
    name: str = "",
    order: str = "any",
    codec: Codec | str | None = None,
    error: Errors | None = None,
    keep: float = 0.0,
) -> Buckets | tuple[Buckets, Work]:
    """Reduce, and keep this rank's part; see ``Communicator.reduce_scatter``."""
    return current().reduce_scatter(
        buckets, op, out, async_op, accumulate=accumulate, name=name, order=order, codec=codec, error=error, keep=keep
    )


def all_gather(
    shards: Buckets,
    out: Buckets | None = None,
    async_op: bool = False,
    *,
    name: str = "",
    codec: Codec | str | None = None,
    error: Errors | None = None,
    keep: float = 0.0,
    differences: bool = False,
) -> Buckets | tuple[Buckets, Work]:
    """Concatenate the shards of all ranks; see ``Communicator.all_gather``."""
    return current().all_gather(
        shards, out, async_op, name=name, codec=codec, error=error, keep=keep, differences=differences
    )


@overload
def broadcast(buckets: Buckets, root: int = ..., async_op: Literal[False] = ..., *, name: str = ...) -> None: ...
@overload
def broadcast(buckets: Buckets, root: int = ..., *, async_op: Literal[True], name: str = ...) -> Work: ...
@overload
def broadcast(buckets: Buckets, root: int = ..., async_op: bool = ..., *, name: str = ...) -> Work | None: ...


def broadcast(buckets: Buckets, root: int = 0, async_op: bool = False, *, name: str = "") -> Work | None:
    """Copy root's buckets into the buckets of all ranks; see ``Communicator.broadcast``."""
    return current().broadcast(buckets, root, async_op, name=name)


@overload
def reduce(
    buckets: Buckets, root: int = ..., op: Op = ..., async_op: Literal[False] = ..., *, name: str = ...
) -> None: ...
@overload
def reduce(buckets: Buckets, root: int = ..., op: Op = ..., *, async_op: Literal[True], name: str = ...) -> Work: ...
@overload
def reduce(
    buckets: Buckets, root: int = ..., op: Op = ..., async_op: bool = ..., *, name: str = ...
) -> Work | None: ...


def reduce(buckets: Buckets, root: int = 0, op: Op = "sum", async_op: bool = False, *, name: str = "") -> Work | None:
    """Reduce into root's buckets; see ``Communicator.reduce``."""
    return current().reduce(buckets, root, op, async_op, name=name)


def gather(
    shards: Buckets, root: int = 0, out: Buckets | None = None, async_op: bool = False, *, name: str = ""
) -> Buckets | tuple[Buckets | None, Work] | None:
    """Concatenate the shards of all ranks at root; see ``Communicator.gather``."""
    return current().gather(shards, root, out, async_op, name=name)


def scatter(
    out: Buckets, buckets: Buckets | None = None, root: int = 0, async_op: bool = False, *, name: str = ""
) -> Work | None:
    """Deal root's buckets to all ranks; see ``Communicator.scatter``."""
    return current().scatter(out, buckets, root, async_op, name=name)


def all_to_all(
    out: Buckets,
    inp: Buckets,
    async_op: bool = False,
    *,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    name: str = "",
) -> Work | None:
    """Send a part to each rank and receive a part from each; see ``Communicator.all_to_all``."""
    return current().all_to_all(out, inp, async_op, out_splits=out_splits, in_splits=in_splits, name=name)


def send(buckets: Buckets, dst: int, tag: int = 0, async_op: bool = False, *, name: str = "") -> Work | None:
    """Send to one rank; see ``Communicator.send``."""
    return current().send(buckets, dst, tag, async_op, name=name)


@overload
def recv(
    buckets: Buckets, src: int | None = ..., tag: int = ..., async_op: Literal[False] = ..., *, name: str = ...
) -> int: ...
@overload
def recv(
    buckets: Buckets, src: int | None = ..., tag: int = ..., *, async_op: Literal[True], name: str = ...
) -> RecvWork: ...
@overload
def recv(
    buckets: Buckets, src: int | None = ..., tag: int = ..., async_op: bool = ..., *, name: str = ...
) -> int | RecvWork: ...


def recv(
    buckets: Buckets, src: int | None = None, tag: int = 0, async_op: bool = False, *, name: str = ""
) -> int | RecvWork:
    """Receive from one rank; see ``Communicator.recv``."""
    return current().recv(buckets, src, tag, async_op, name=name)


@overload
def barrier(async_op: Literal[False] = ..., *, name: str = ...) -> None: ...
@overload
def barrier(async_op: Literal[True], *, name: str = ...) -> Work: ...
@overload
def barrier(async_op: bool = ..., *, name: str = ...) -> Work | None: ...


def barrier(async_op: bool = False, *, name: str = "") -> Work | None:
    """Wait until every rank has called it."""
    return current().barrier(async_op, name=name)


@overload
def empty(*shape: int, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...
@overload
def empty(shape: Sequence[int], /, *, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...
@overload
def empty(n: int, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...


def empty(
    *shape: Any, dtype: torch.dtype = torch.float32, device: str | None = None, n: int | None = None
) -> torch.Tensor:
    """Allocate a symmetric tensor, zero-filled; see ``Communicator.empty``."""
    return current().empty(*(shape if n is None else (n, *shape)), dtype=dtype, device=device)
