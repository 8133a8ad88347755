"""Messages between ranks while building, saving and loading: JSON values, whole tensors, and which rank failed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zcomm._core import PeerLost
from zcomm.comm.communicator import Communicator
from zcomm.comm.tensors import DTYPES

T = TypeVar("T")


def all_values(comm: Communicator, value: Any, name: str) -> list[Any]:
    """Return each rank's ``value`` (JSON), in rank order. Collective."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)])
    comm.all_reduce(longest, op="max", name=f"{name}: length")
    padded = torch.zeros(int(longest) or 1, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    every = comm.all_gather(padded, name=name)
    assert isinstance(every, torch.Tensor)
    rows = every.view(comm.world_size, -1)
    return [json.loads(bytes(row.numpy()).rstrip(b"\0")) for row in rows]


class ErrorHolder:
    """Errors of this rank, interrupts included, kept until the ranks ``agree``.

    The other ranks wait in ``agree``. A rank that raised at once would leave them waiting forever.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def errors(self) -> ErrorHolder:
        """Keep the first error of the block ``with kept.errors():``. The block must hold no collective."""
        return self

    def __enter__(self) -> None:
        pass  # not a generator: an interrupt on the way into one becomes another error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.error = self.error or error
        return True


def agree(comm: Communicator, error: BaseException | None, what: str, name: str = "") -> None:
    """Raise on all ranks if any rank has an error: that rank its own, the others one that names the rank. Collective.

    If a rank left during the message, raise PeerLost from the own error, which may only be a consequence.

    The others get a ValueError for a ValueError, TypeError or NotImplementedError, and an OSError of the same errno for
    an OSError. Any other error becomes an OSError (ECANCELED for an interrupt, EIO). The text begins with the failed
    action. name: compared between the ranks; empty: it is made of the action's first word.
    """
    name, mine = name or f"{what.split()[0]} a checkpoint", None if error is None else _described(error)
    if error is not None:
        try:
            all_values(comm, mine, name)
        except PeerLost as lost:
            if isinstance(error, Exception):  # the lost rank may have removed the folder, which caused the error
                raise lost from error
        except Exception:
            pass  # the communicator has failed, so that the other ranks raise, too
        raise error
    found = all_values(comm, mine, name)
    for rank, one in enumerate(found):
        if one is not None:
            raise _of_rank(rank, what, one)


def agreed(comm: Communicator, what: str, action: Callable[[], T]) -> T:
    """Return ``action()``, which is local, after it has succeeded on all ranks. Raises: as ``agree``. Collective."""
    kept = ErrorHolder()
    with kept.errors():
        value = action()
    agree(comm, kept.error, what)
    return value


def check_places(call: str, places: list[str]) -> None:
    """Raise ValueError if the ranks gave different ``places``, paths in rank order."""
    others = [rank for rank, place in enumerate(places) if place != places[0]]
    if others:
        shown = "; ".join(f"rank {rank} gave {places[rank]}" for rank in others[:4])
        more = f"; and {len(others) - 4} more ranks another one than rank 0" if len(others) > 4 else ""
        raise ValueError(
            f"{call}: the ranks gave different places: rank 0 gave {places[0]}; {shown}{more}: give one place "
            "everywhere, that all ranks share"
        )


def from_root(comm: Communicator, root: int, what: str, action: Callable[[], T]) -> T | None:
    """Return ``action()``, which is local, on rank ``root``, and None on the others. Collective.

    Raises: the error of ``action`` on ``root``. On the others an error as in ``agree``, with the text of that error,
    which begins with the given action, in words ("reading weight").
    """
    value: T | None = None
    kept = ErrorHolder()
    if comm.rank == root:
        with kept.errors():
            value = action()
    if comm.world_size == 1:
        if kept.error is not None:
            raise kept.error
        return value
    name = f"error of {what}"
    data = b"" if kept.error is None else json.dumps(_described(kept.error)).encode()
    length = torch.tensor([len(data)])
    try:
        comm.broadcast(length, root=root, name=f"{name}: length")
        if int(length):
            text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(length)).byte()
            comm.broadcast(text, root=root, name=name)
    except Exception:
        if kept.error is None:
            raise  # otherwise the communicator has failed, so that the other ranks raise too
    if kept.error is not None:
        raise kept.error
    if int(length):
        raise _of_rank(root, what, json.loads(bytes(text.numpy())))
    return value


def _of_rank(rank: int, what: str, described: tuple[int | None, str]) -> Exception:
    """Return the error for the other ranks. described: as ``_described`` returns it."""
    code, text = described
    words = f"{what} failed on rank {rank}: {text}"
    return ValueError(words) if code is None else OSError(code, words)


def _described(error: BaseException) -> tuple[int | None, str]:
    """Return errno (None: a ValueError) and words."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO, str(error)
    if isinstance(error, ValueError):
        return None, str(error)
    if isinstance(error, (TypeError, NotImplementedError)):
        return None, f"{type(error).__name__}: {error}"
    code = errno.EIO if isinstance(error, Exception) else errno.ECANCELED
    return code, f"{type(error).__name__}: {error}"


def broadcast(comm: Communicator, tensor: torch.Tensor, root: int, name: str) -> None:
    """Broadcast a contiguous tensor of any device and dtype, or a conjugated or negated view. Collective."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    octets = host
    if host.dtype not in DTYPES:  # the core moves its bytes
        octets, name = host.reshape(-1).view(torch.uint8), f"{name}, {host.dtype}"
    comm.broadcast(octets, root=root, name=name)
    if host.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(host)
