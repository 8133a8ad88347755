"""Transaction: a step happens on all ranks, or on none (``Offload(atomic=True)``).

It begins before a step's first update, and ends with ``commit``. All ranks wait for their writes, and compare whether
these succeeded. Then the new versions count ([Note: transaction] in cache/shadow.py). An earlier error undoes the step
(``UpdateScheduler.undo``): weights, optimizer state and counters have their earlier values, and its gradients are
dropped. Updates in ``step()`` and in backward are committed in ``step()``. Those in the next forward are committed in
the next step(), or in a call that all ranks make before it. Backward compares nothing, because ranks may launch buckets
at different points of it. Weights and state in RAM have a second copy, made as a transaction begins.
An interrupt during the comparison waits until it has ended. A second one ends it: ranks may then have committed
different numbers of steps, which the next transaction finds.
Thread rule: the thread that runs forward, backward and step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.zero.cache.swap import AnySwap
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.parts import TrainState
from zcomm.zero.poison import HalfDoneError, StepUndoneError, broadcast_error, check_error
from zcomm.zero.units.store import UnitStore

# Errors of lost or late ranks: they are not replaced.
OF_RANKS = (_core.PeerLost, _core.CollectiveMismatch, TimeoutError, ConnectionError)


class NoTransaction:
    """Steps that cannot be undone.

    undoes: whether failed steps can be undone. open: a step has begun, and neither been committed nor undone. count:
    committed steps.
    """

    undoes = False
    open = False
    count = 0

    def begin(self) -> None:
        """Begin a step before anything is counted or updated. Collective.

        Raises: OSError of an earlier write, which poisons. HalfDoneError if ranks have made different steps.
        """

    def begin_alone(self) -> None:
        """Begin a step as ``begin``, but not collective: ranks are not at one point of their backward pass."""

    def commit(self) -> None:
        """Make an open step count if all ranks have succeeded. Collective then, inside of ``watch``.

        Raises: the error of this rank, or of another one.
        """

    def check_counts(self, most: int, least: int) -> None:
        """Raise HalfDoneError, which poisons, if ranks have committed ``most`` and ``-least`` steps."""

    def take_back(self) -> None:
        """Restore weights, optimizer state and counters from before the step, and end the transaction. Local."""

    def undone(self, what: str, error: BaseException) -> StepUndoneError:
        """Return the error of a step that ``error`` has undone."""
        raise NotImplementedError("no step is undone")

    def warning(self, what: str) -> str:
        """Describe an undone step for which nothing is raised."""
        return f"{what}: an error has ended a step"

    def forget(self) -> None:
        """Forget all steps: a checkpoint was loaded. Collective calls come next."""

    def state_grew(self) -> None:
        """Keep copies of the state's new memory. An open step has changed nothing in it."""

    def nbytes(self) -> tuple[int, int] | None:
        """Return the bytes of the second versions on the drive and in RAM; None: there are none."""
        return None


class Transaction(NoTransaction):
    """The transaction of a step. swap: has its ``versions``. Memory: a copy of weights and state in RAM."""

    undoes = True

    def __init__(
        self,
        store: UnitStore,
        state: OptimState,
        swap: AnySwap,
        comm: Communicator,
        train: TrainState,
    ) -> None:
        self._store, self._state, self._swap, self._versions = store, state, swap, swap.versions
        self._comm, self._train, self._poison = comm, train, train.poison
        train.poison.versions = swap.versions
        self._take_residents()
        self._restore: Callable[[], None] = lambda: None
        self._step = 0

    def _take_residents(self) -> None:
        resident = [*self._store.source.resident(), *self._state.resident()]
        self._copies = [(each, torch.zeros_like(each)) for each in resident]

    def state_grew(self) -> None:
        self._take_residents()
        for own, copy in self._copies if self.open else ():
            copy.copy_(own)

    @property
    def open(self) -> bool:  # type: ignore[override]
        return self._versions.open

    @property
    def count(self) -> int:  # type: ignore[override]
        return self._versions.count

    def nbytes(self) -> tuple[int, int] | None:
        on_drive = self._store.changing_nbytes + self._state.nbytes_by_tier.get("nvme", 0)
        return on_drive, sum(copy.nbytes for _, copy in self._copies)

    def begin(self) -> None:
        try:
            self._finish_writes()
        except BaseException as error:
            if isinstance(error, OSError):
                self._poison.error = self._poison.error or error
            broadcast_error(self._comm, error)
            raise
        try:
            check_error(self._comm, "a write from before step()")
        except OSError as error:
            self._poison.error = self._poison.error or error
            raise
        if self._comm.world_size > 1:
            ends = torch.tensor([self.count, -self.count], dtype=torch.int32)
            self._comm.all_reduce(ends, op="max", name="steps that were committed")
            self.check_counts(*ends.tolist())
        self._begin()

    def begin_alone(self) -> None:
        self._finish_writes()
        self._begin()

    def _begin(self) -> None:
        for own, copy in self._copies:
            copy.copy_(own)
        self._restore, self._step = self._train.kept(), self._train.step_count + 1
        self._versions.begin()

    def check_counts(self, most: int, least: int) -> None:
        if most != -least:
            words = f"ranks have committed {-least} to {most} steps: one was interrupted as it did so"
            self._poison.error = HalfDoneError(words)
            self._poison.check("step()")

    def _finish_writes(self) -> None:
        self._state.finish_writes()
        self._store.source.finish_writes()

    def commit(self) -> None:
        if not self.open:
            return
        try:
            self._store.gather.synchronize()
            before = self._poison.error
            if before is not None:  # an interrupt was raised then
                raise before if isinstance(before, Exception) else HalfDoneError(f"{type(before).__name__} during it")
            self._finish_writes()
        except BaseException as error:
            broadcast_error(self._comm, error)
            raise
        with uninterrupted():
            check_error(self._comm)
            self._versions.commit()

    def take_back(self) -> None:
        self._store.life.forget()
        self._state.forget()
        self._store.source.forget()
        for own, copy in self._copies:
            own.copy_(copy)
        self._restore()
        self._store.count_change()  # graphs that saved other weights raise
        self._swap.roll_back()

    def undone(self, what: str, error: BaseException) -> StepUndoneError:
        return StepUndoneError(
            f"{what}: {type(error).__name__}: {error}; step {self._step} was undone on all ranks: weights, optimizer "
            "state and counters are those of before it, its gradients are gone; call zero_grad() and run its batch "
            "again",
            self._step,
        )

    def warning(self, what: str) -> str:
        return f"{what}: backward has ended with an error: its updates for step {self._step} are undone"

    def forget(self) -> None:
        self._versions.forget()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay a first SIGINT until the block has ended."""
    before: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[Any, Any]] = []

    def keep(number: int, frame: Any) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
