"""A swap file that reads and writes as late as its contract permits: when its Work is waited for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from zcomm import _core
from zcomm.zero.cache.swap import Swap


class _Operation:
    def __init__(self, key: str, reads: bool, address: int, begin: Callable[[], _core.Work]) -> None:
        self.key, self.reads, self.address, self._begin = key, reads, address, begin
        self.work: _core.Work | None = None
        self.pending = True

    def run(self) -> None:
        if self.pending:
            self.pending = False
            self.work = self._begin()


class LateWork:
    """A Work that ends when it is dropped (the core's waits), so that a test without its memory does not crash."""

    def __init__(self, swap: LateSwap, operation: _Operation) -> None:
        self._swap, self._operation = swap, operation

    def wait(self, timeout: float | None = None) -> None:
        self._swap.run_until(self._operation)
        if self._operation.work is not None:
            self._operation.work.wait(timeout)

    def done(self) -> bool:
        return self._operation.work is not None and self._operation.work.done()

    def __del__(self) -> None:
        self._operation.pending = False


class LateSwap(Swap):
    """Replaces ``Swap``: operations run in the order of their calls. close() starts none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._operations: list[_Operation] = []
        self._lock = threading.RLock()  # several threads read and write

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._later(key, True, ptr, lambda: super(LateSwap, self).read(key, ptr, nbytes))

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._later(key, False, ptr, lambda: super(LateSwap, self).write(key, ptr, nbytes))

    def _later(self, key: str, reads: bool, address: int, begin: Callable[[], _core.Work]) -> LateWork:
        operation = _Operation(key, reads, address, begin)
        with self._lock:
            self._operations.append(operation)
        return LateWork(self, operation)

    def run_until(self, last: _Operation | None = None) -> None:
        with self._lock:
            for operation in self._operations:
                operation.run()
                if operation is last:
                    return

    def release(self, key: str) -> None:
        if any(each.pending and each.key == key for each in self._operations):
            raise ValueError(f"key {key!r} has operations in flight")
        super().release(key)

    def wait(self) -> None:
        self.run_until()
        super().wait()

    def pending_in(self, begin: int, nbytes: int) -> int:
        """Count operations on this memory that have not begun."""
        return sum(each.pending and begin <= each.address < begin + nbytes for each in self._operations)

    @property
    def pending_reads(self) -> int:
        return sum(each.pending and each.reads for each in self._operations)


def watch_leases(monkeypatch: pytest.MonkeyPatch, swaps: list[LateSwap]) -> list[int]:
    """Record, from now on, the pending operations on each arena lease when it is released; return the list."""
    found: list[int] = []
    allocate = _core.PinnedArena.allocate

    def watched(self: _core.PinnedArena, nbytes: int) -> _core.Lease:
        lease = allocate(self, nbytes)
        where = lease.address, nbytes
        weakref.finalize(lease, lambda: found.append(sum(swap.pending_in(*where) for swap in swaps)))
        return lease

    monkeypatch.setattr(_core.PinnedArena, "allocate", watched)
    return found


class Interrupted(LateSwap):
    """Raises KeyboardInterrupt between the start of a write and the line that stores its Work; its frames keep it.

    at: prefix of the key; None once it has been raised.
    """

    at: str | None = None

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        work = super().write(key, ptr, nbytes)
        if Interrupted.at is not None and key.startswith(Interrupted.at):
            Interrupted.at = None
            raise KeyboardInterrupt
        return work
