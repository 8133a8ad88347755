"""Poison: whether weights and optimizer state are of one step.

A step or a load that ends half way leaves weights and state of two steps; only a whole load clears that. At the end of
a step the ranks compare whether it succeeded, so that all learn of a failure on one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import all_values

_NAME = "end of the step"


class HalfDoneError(RuntimeError):
    """Error of a call that needs whole weights and state, where a step or a load has ended half way on some rank."""


class StepUndoneError(RuntimeError):
    """Error of a step that was undone (``Offload(atomic=True)``): weights, optimizer state and counters have their
    earlier values, and its gradients are dropped.

    step: its number, as ``step_count`` would be after it.
    """

    def __init__(self, words: str, step: int) -> None:
        super().__init__(words)
        self.step = step


class Versions(Protocol):
    """Second versions of weights and state, as far as the poison is concerned."""

    @property
    def open(self) -> bool:
        """Return True if a step has begun, and neither been committed nor undone."""


class _OneVersion:
    open = False


class Poison:
    """The first error that left something half done. error: None if weights and state are whole.

    unreported: that error was outside of collective calls, so that the other ranks do not know of it yet. versions: of
    a transaction (schedule/transaction.py).
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.unreported = False
        self.versions: Versions = _OneVersion()

    def undone(self) -> bool:
        """Return True if a step that ends with an error now will be undone, once all ranks have learned of it."""
        return self.versions.open

    def check(self, what: str) -> None:
        """Raise HalfDoneError, caused by that error, for a call that needs whole weights and state."""
        if self.error is not None:
            if self.undone():
                raise HalfDoneError(
                    f"{what}: {type(self.error).__name__} ended a step half way ({self.error}); the next forward, or "
                    "step(), undoes it on all ranks"
                ) from self.error
            raise HalfDoneError(
                f"{what}: {type(self.error).__name__} ended a step or a load half way ({self.error}), so that weights "
                "and optimizer state are of two steps; load a checkpoint (opt.load) on all ranks, or start again"
            ) from self.error

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Keep the error that ends the block, which leaves weights and state half done."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            self.unreported = self.unreported or self.undone()
            raise

    def clear(self) -> None:
        """Forget the error: weights and state are whole again."""
        self.error, self.unreported = None, False


def broadcast_error(comm: Communicator, error: BaseException) -> None:
    """Make the other ranks raise in ``check_error``: this rank's step ended with ``error``. Raises nothing but a
    further interrupt."""
    if comm.world_size > 1:
        with contextlib.suppress(Exception):  # a failed communicator reports to the other ranks itself
            _any_failed(comm, True)
            code = error.errno if isinstance(error, OSError) else None
            all_values(comm, [code, f"{type(error).__name__}: {error}"], f"{_NAME}: error")


def check_error(comm: Communicator, what: str = "step()") -> None:
    """Compare with the other ranks that this rank's step, or the named call, succeeded. Collective.

    Raises: OSError if another rank had one, else HalfDoneError; it names the rank.
    """
    if comm.world_size > 1 and _any_failed(comm, False):
        found = all_values(comm, None, f"{_NAME}: error")
        rank, (code, text) = next((rank, each) for rank, each in enumerate(found) if each is not None)
        words = f"{what} failed on rank {rank}: {text}"
        raise HalfDoneError(words) if code is None else OSError(code, words)


def _any_failed(comm: Communicator, failed: bool) -> bool:
    flag = torch.tensor([int(failed)], dtype=torch.int32)
    comm.all_reduce(flag, op="max", name=_NAME)
    return bool(flag)
