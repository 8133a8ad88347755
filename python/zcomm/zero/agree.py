"""Messages between ranks while building, saving and loading: small JSON values, and which rank failed."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from zcomm._core import PeerLost
from zcomm.comm.communicator import Communicator

T = TypeVar("T")


def all_values(comm: Communicator, value: Any, name: str) -> list[Any]:
    """Each rank's ``value`` (JSON), in rank order. Collective."""
    data = json.dumps(value).encode()
    longest = torch.tensor([len(data)])
    comm.all_reduce(longest, op="max", name=f"{name}: length")
    padded = torch.zeros(int(longest) or 1, dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)[: len(data)]
    every = comm.all_gather(padded, name=name)
    assert isinstance(every, torch.Tensor)
    rows = every.view(comm.world_size, -1)
    return [json.loads(bytes(row.numpy()).rstrip(b"\0")) for row in rows]


class Kept:
    """Errors of this rank, interrupts included, kept until the ranks ``agree``.

    The others wait there, and would wait for ever for a rank that just raised.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def errors(self) -> Kept:
        """Keep the first error of what is inside ``with kept.errors():``. Nothing inside may be collective."""
        return self

    def __enter__(self) -> None:
        pass  # not a generator: an interrupt on the way into one becomes another error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self.error = self.error or error
        return True


def agree(comm: Communicator, error: BaseException | None, what: str, name: str = "") -> None:
    """Raise where any rank has an error: its own there, on the others one that names the rank. Collective.

    Where a rank left meanwhile, PeerLost from the own error, which may be no more than a trace of that.

    The others get a ValueError for a ValueError, and an OSError of the same errno for an OSError. Else they get an
    OSError (ECANCELED for an interrupt, EIO). what: what failed, in words. name: compared between the ranks; else
    that is the first word of ``what``.
    """
    name, mine = name or f"{what.split()[0]} a checkpoint", None if error is None else _described(error)
    if error is not None:
        try:
            all_values(comm, mine, name)
        except PeerLost as lost:
            if isinstance(error, Exception):  # the error may be only that the rank took the folder with it
                raise lost from error
        except Exception:
            pass  # the communicator has failed: the others know
        raise error
    found = all_values(comm, mine, name)
    for rank, one in enumerate(found):
        if one is not None:
            code, text = one
            words = f"{what} failed on rank {rank}: {text}"
            raise ValueError(words) if code is None else OSError(code, words)


def agreed(comm: Communicator, what: str, action: Callable[[], T]) -> T:
    """Return ``action()``, which is local, once no rank has failed in it. Raises: as ``agree``. Collective."""
    kept = Kept()
    with kept.errors():
        value = action()
    agree(comm, kept.error, what)
    return value


def check_places(call: str, places: list[str]) -> None:
    """Raise ValueError where the ranks gave different ``places``, paths in rank order."""
    others = [rank for rank, place in enumerate(places) if place != places[0]]
    if others:
        shown = "; ".join(f"rank {rank} gave {places[rank]}" for rank in others[:4])
        more = f"; and {len(others) - 4} more ranks another one than rank 0" if len(others) > 4 else ""
        raise ValueError(
            f"{call}: the ranks gave different places: rank 0 gave {places[0]}; {shown}{more}: give one place "
            "everywhere, that all ranks share"
        )


def _described(error: BaseException) -> tuple[int | None, str]:
    """Return errno (None: a ValueError) and words."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO, str(error)
    if isinstance(error, ValueError):
        return None, str(error)
    code = errno.EIO if isinstance(error, Exception) else errno.ECANCELED
    return code, f"{type(error).__name__}: {error}"
