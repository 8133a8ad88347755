"""Breakage: whether weights and optimizer state are of one step. A step, or a load, that ended half way leaves them of
two, and nothing but a whole load mends that.

All ranks learn of one that failed: at the end of each sweep they compare whether it went well everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import all_values

_NAME = "end of the step"


class Breakage:
    """error: the first one that left something half done; None: all is whole."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def check(self, what: str) -> None:
        """Raises: RuntimeError, caused by that error, for ``what``, which needs whole weights and state."""
        if self.error is not None:
            raise RuntimeError(
                f"{what}: {type(self.error).__name__} ended a step or a load half way ({self.error}), so that weights "
                "and optimizer state are of two steps; load a checkpoint (opt.load) on all ranks, or start again"
            ) from self.error

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Weights and state change inside: whatever ends it early leaves them half done."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise

    def mended(self) -> None:
        self.error = None


def tell(comm: Communicator, error: BaseException) -> None:
    """This rank's sweep ended with ``error``: the others raise in ``hear``. Raises nothing but a further interrupt."""
    if comm.world_size > 1:
        with contextlib.suppress(Exception):  # of a communicator that has failed, too: they know then
            _any_failed(comm, True)
            all_values(comm, [_code(error), f"{type(error).__name__}: {error}"], f"{_NAME}: error")


def hear(comm: Communicator) -> None:
    """This rank's sweep went well. Collective. Raises: OSError where another rank had one, else RuntimeError; it
    names the rank."""
    if comm.world_size > 1 and _any_failed(comm, False):
        found = all_values(comm, None, f"{_NAME}: error")
        rank, (code, text) = next((rank, each) for rank, each in enumerate(found) if each is not None)
        words = f"step() failed on rank {rank}: {text}"
        raise RuntimeError(words) if code is None else OSError(code, words)


def _any_failed(comm: Communicator, failed: bool) -> bool:
    flag = torch.tensor([int(failed)], dtype=torch.int32)
    comm.all_reduce(flag, op="max", name=_NAME)
    return bool(flag)


def _code(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None
