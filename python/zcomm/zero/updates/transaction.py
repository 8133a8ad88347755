"""Transaction: a step happens on all ranks, or on none (``Offload(atomic=True)``).

It begins before a step's first update, and ends with ``commit``. All ranks wait for what they have written, and
compare whether that went well. Then the new versions count ([Note: transaction] in cache/shadow.py). An error
before that undoes the step. Weights, optimizer state and counters are those of before it, and its gradients are gone.
Updates in ``step()`` and in backward are committed in ``step()``. Those in the next forward are in the next step(), or
in a call that all ranks make before it. Backward compares nothing: ranks may launch buckets at other points of it.
What is in RAM has a second copy, made as a transaction begins. Units forget what they have gathered.
An interrupt amid the comparison waits until it has ended. A second one ends it: then ranks may have committed different
numbers of steps, which the next transaction finds.
Thread rule: the thread that runs forward, backward and step.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.zero.cache.shadow import Versions
from zcomm.zero.cache.swap import Swap
from zcomm.zero.optim_state.state import OptimState
from zcomm.zero.poison import HalfDoneError, Poison, StepUndoneError, broadcast_error, check_error
from zcomm.zero.units.store import UnitStore

_OF_RANKS = (_core.PeerLost, _core.CollectiveMismatch, TimeoutError, ConnectionError)


class Counters(Protocol):
    """The counters of a step. step_count: steps that were made."""

    step_count: int
    poison: Poison

    def kept(self) -> Callable[[], None]:
        """Keep what is counted now. Returns: a function that restores it."""


class Transaction:
    """The transaction of a step. swap: its file, if there is one, has ``versions``.

    on_undo: called as a step is undone. Memory: a copy of weights and state that are in RAM.
    """

    def __init__(
        self,
        store: UnitStore,
        state: OptimState,
        swap: Swap | None,
        versions: Versions,
        comm: Communicator,
        counters: Counters,
    ) -> None:
        self._store, self._state, self._swap, self._versions = store, state, swap, versions
        self._comm, self._counters, self._poison = comm, counters, counters.poison
        self._take_residents()
        self._restore: Callable[[], None] = lambda: None
        self._step = 0
        self.on_undo: list[Callable[[], None]] = []
        counters.poison.undone = lambda: versions.open
        store.life.failed = self._gather_failed

    def _take_residents(self) -> None:
        resident = [*self._store.source.resident(), *self._state.resident()]
        self._copies = [(each, torch.zeros_like(each)) for each in resident]

    def state_grew(self) -> None:
        """Keep copies of the state's new memory. A step that has begun has changed nothing in it."""
        self._take_residents()
        for own, copy in self._copies if self.open else ():
            copy.copy_(own)

    @property
    def open(self) -> bool:
        """True if a step has begun, and neither been committed nor undone."""
        return self._versions.open

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for _, copy in self._copies)

    @property
    def drive_nbytes(self) -> int:
        """Bytes of the second versions on the drive."""
        return self._store.changing_nbytes + self._state.nbytes_by_tier.get("nvme", 0)

    def begin(self) -> None:
        """Begin a step, of which nothing has been counted or updated. Collective.

        Raises: OSError of a write from before it, which poisons. HalfDoneError where ranks have made different steps.
        """
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
        """Begin a step as ``begin``, but not collective: ranks are not at one point of their backward pass."""
        self._finish_writes()
        self._begin()

    def _begin(self) -> None:
        for own, copy in self._copies:
            copy.copy_(own)
        self._restore, self._step = self._counters.kept(), self._counters.step_count + 1
        self._versions.begin()

    @property
    def count(self) -> int:
        """Number of steps that were committed."""
        return self._versions.count

    def check_counts(self, most: int, least: int) -> None:
        """Raise HalfDoneError, which poisons, where ranks have committed ``most`` and ``-least`` steps."""
        if most == -least:
            return
        error = HalfDoneError(f"ranks have committed {-least} to {most} steps: one was interrupted as it did so")
        if self.open:
            self.undo(error)
        self._poison.error = error
        self._poison.check("step()")

    def _finish_writes(self) -> None:
        self._state.finish_writes()
        self._store.source.finish_writes()
        self._store.memory.wait_written()

    def commit(self) -> None:
        """Make the step count, where one has begun and all ranks were well. Collective then, inside of ``watch``.

        Raises: the error of this rank, or of another one.
        """
        if not self.open:
            return
        try:
            self._store.gather.synchronize()
            before = self._poison.error
            if before is not None:  # an interrupt has been raised then
                raise before if isinstance(before, Exception) else HalfDoneError(f"{type(before).__name__} during it")
            self._finish_writes()
        except BaseException as error:
            broadcast_error(self._comm, error)
            raise
        with _uninterrupted():
            check_error(self._comm)
            self._versions.commit()

    def take_back(self) -> None:
        """Make weights, optimizer state and counters those of before the step, and end the transaction. Local."""
        self._store.life.forget()
        self._state.forget()
        self._store.source.forget()
        self._store.memory.forget_written()
        for own, copy in self._copies:
            own.copy_(copy)
        self._restore()
        self._store.count_change()  # graphs of other weights are known as such
        if self._swap is not None:
            self._swap.roll_back()
        else:
            self._versions.roll_back()

    def undo(self, error: BaseException) -> None:
        """Undo the step, which ``error`` has ended. Local."""
        with _uninterrupted():
            self._poison.error = self._poison.error or error  # until all is done
            for forget in self.on_undo:
                forget()
            with torch.no_grad():
                self.take_back()
            self._poison.clear()

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Undo the step that has begun, where an error ends the block. All ranks' blocks end so.

        Raises: StepUndoneError, caused by that error. Interrupts, and errors of lost or late ranks, stay as they are.
        """
        try:
            yield
        except BaseException as error:
            if not self.open:
                raise
            self.undo(error)
            if isinstance(error, _OF_RANKS) or not isinstance(error, Exception):
                raise
            raise self.undone(what, error) from error

    def undone(self, what: str, error: BaseException) -> StepUndoneError:
        """Return the error of a step that ``error`` has undone."""
        return StepUndoneError(
            f"{what}: {type(error).__name__}: {error}; step {self._step} was undone on all ranks: weights, optimizer "
            "state and counters are those of before it, its gradients are gone; call zero_grad() and run its batch "
            "again",
            self._step,
        )

    def settle(self, what: str, update: Callable[[], None]) -> None:
        """Make the updates that are left by ``update``, and commit. Collective."""
        with self.watch(what):
            try:
                if self._poison.error is None:
                    update()
            except BaseException as error:
                broadcast_error(self._comm, self._poison.error or error)
                raise
            self.commit()

    def forget(self) -> None:
        """Forget all steps: a checkpoint was loaded. Collective calls come next."""
        self._versions.forget()

    def warn(self, what: str) -> None:
        """Log that a step is undone, where nothing is raised for it."""
        words = "%s: backward has ended with an error: its updates for step %d are undone"
        logging.getLogger("zcomm").warning(words, what, self._step)

    def _gather_failed(self, error: BaseException) -> None:
        """Undo a step that a gather has ended, on all ranks: they compare in it."""
        cause = self._poison.error  # of this gather, or of one before it
        if self.open and cause is not None and isinstance(error, Exception):
            self.undo(cause)
            if not isinstance(error, _OF_RANKS):
                raise self.undone("forward", cause) from cause


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a first SIGINT wait until the block has ended."""
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
