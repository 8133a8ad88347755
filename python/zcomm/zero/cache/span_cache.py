"""SpanCache: items on a drive; a few windows of pinned memory hold some of them at a time.

[Note: span cache] An item is bytes of one or several keys of a swap file, back to back. Item i can be in window
i % windows. A window holds one item or none, and has one pending operation at most. It is in one of three states.
Clean: it holds bytes that are on the drive, or has a pending read or write of them. Dirty: the drive lacks its bytes,
and no operation is pending. Empty: at the start, while an item is edited or lent, after an operation that failed.
``edit`` empties the window and returns its memory to the caller, until ``write`` or ``mark``. If neither follows, the
drive's bytes are the item. An item that was never written is zeros. A dirty item is written before its window holds
another one. No window's memory is used before its pending operation has ended.
An error of a read or write is raised once, by the first call that needs its item or its window. The window is empty
then. An interrupt leaves the operation pending: it is waited for again.
Thread rule: one thread at a time. ``read_into`` and ``read_part_into`` on any, for items that no thread edits.
Source: ZeRO-Infinity (arXiv:2104.07857) section 5.1; architecture decision D8.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.cache.swap import Swap
from zcomm.zero.worker import Pollable, StallTimer

KeysOf = Callable[[int], Iterable[tuple[str, int]]]  # of an item: keys and their bytes, in order


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to pages: extents and windows begin at pages."""
    page = _core.page_nbytes()
    return -(-nbytes // page) * page


def windows_nbytes(largest: int, items: int, windows: int) -> int:
    """Return the bytes of the windows for ``items`` items of at most ``largest`` bytes."""
    return min(windows, items) * whole_pages(largest)


class WorkGroup:
    """Operations on the keys of one item."""

    def __init__(self) -> None:
        self._works: list[_core.Work] = []

    def add(self, work: _core.Work) -> None:
        self._works.append(work)

    def done(self) -> bool:
        """Return True if all have ended, also with errors."""
        return all(work.done() for work in self._works)

    def wait(self) -> None:
        """Wait for all. Raises: the first error."""
        failed: OSError | None = None
        while self._works:
            try:
                self._works[0].wait()
            except OSError as error:
                failed = failed or error
            del self._works[0]  # not before: an interrupt leaves it pending
        if failed is not None:
            raise failed


class SpanCache:
    """The windows of ``items`` items. keys: of each item; whole pages need no bounce buffer.

    windows: at most as many as items. fixed: items that no step changes (``Swap.reserve``).
    Memory: ``nbytes``, pinned; a few bytes for each item. Raises: OSError (ENOSPC) if the drive lacks space.
    """

    def __init__(
        self,
        swap: Swap,
        arena: _core.PinnedArena,
        items: int,
        keys: KeysOf,
        windows: int,
        fixed: Collection[int] = (),
    ) -> None:
        self._swap, self._keys = swap, keys
        largest = max((self._size(item) for item in range(items)), default=0)
        count, stride = min(windows, items), whole_pages(largest)
        self.nbytes = windows_nbytes(largest, items, windows)
        # Before the memory: attributes are dropped in this order, and a dropped Work is waited for.
        self._works: list[Pollable | None] = [None] * count
        memory = tensor_of(arena.allocate(self.nbytes), torch.uint8) if count else torch.empty(0, dtype=torch.uint8)
        self._windows = [memory[window * stride :][:stride] for window in range(count)]
        self._reads = [False] * count  # whether the pending operation is a read
        self._holds = [-1] * count
        self._dirty = [False] * count
        self._stored = bytearray(items)  # whether the drive has it
        self._stalls = StallTimer()
        for item in range(items):
            for key, nbytes in keys(item):
                swap.reserve(key, nbytes, fixed=item in fixed)

    @property
    def waited_s(self) -> float:
        """Seconds that threads which train have waited for the drive."""
        return self._stalls.seconds

    @property
    def pending_reads(self) -> int:
        """Number of reads into windows that no call has waited for."""
        return sum(self._reads)

    def window(self, item: int) -> int:
        """Return the number of the item's window."""
        return item % len(self._windows)

    def memory(self, item: int) -> torch.Tensor:
        """Return the memory of the item in its window, flat uint8, whatever it holds."""
        return self._windows[self.window(item)][: self._size(item)]

    def held(self, window: int) -> int:
        """Return the item that a window holds, or -1."""
        return self._holds[window]

    def is_dirty(self, item: int) -> bool:
        """Return True if its window holds the item, and the drive lacks it."""
        window = self.window(item)
        return self._holds[window] == item and self._dirty[window]

    def _size(self, item: int) -> int:
        return sum(nbytes for _, nbytes in self._keys(item))

    # --- one item ---------------------------------------------------------------------------------------------

    def prefetch(self, item: int) -> None:
        """Start to read the item, unless its window holds it. Waits until that is free.

        Raises: OSError of the window's last read or write.
        """
        window = self.window(item)
        if self._holds[window] == item:
            return
        self._vacate(window)
        if self._stored[item]:
            works = self._works[window] = WorkGroup()
            self._reads[window] = True
            self._start(works, item, self.memory(item), self._swap.read)
        else:
            self.memory(item).zero_()
        self._holds[window] = item

    def prefetch_if_free(self, item: int) -> None:
        """Start to read the item, unless its window is dirty or in use, or there is nothing to read."""
        window = self.window(item)
        work = self._works[window]
        if self._stored[item] and not self._dirty[window] and (work is None or work.done()):
            self.prefetch(item)

    def read(self, item: int) -> torch.Tensor:
        """Return the item, not to be changed, valid until its window is needed for another one. Raises: OSError."""
        self.prefetch(item)
        window = self.window(item)
        if self._reads[window]:
            self._settle(window)
        return self.memory(item)

    def peek(self, item: int) -> torch.Tensor | None:
        """Return the item if its window holds it now; never wait."""
        window = self.window(item)
        return self.memory(item) if self._holds[window] == item and not self._reads[window] else None

    def edit(self, item: int, load: bool = True) -> torch.Tensor:
        """Return the item's memory, which nothing reads or writes, to be changed until ``write`` or ``mark``.

        load: False: with any content. Raises: OSError.
        """
        window = self.window(item)
        if load:
            self.prefetch(item)
            self._settle(window)
        elif self._holds[window] == item and not self._reads[window]:
            self._settle(window)
        else:
            self._vacate(window)
        self._holds[window], self._dirty[window] = -1, False
        return self.memory(item)

    def mark(self, item: int) -> None:
        """End ``edit``: the item is written when its window is needed, or by ``flush``."""
        window = self.window(item)
        self._holds[window], self._dirty[window] = item, True

    def write(self, item: int) -> None:
        """End ``edit``, or ``mark``: start to write the item. If that raises, it is dirty."""
        window = self.window(item)
        self._settle(window)
        self.mark(item)
        works = self._works[window] = WorkGroup()
        self._start(works, item, self.memory(item), self._swap.write)
        self._stored[item] = True
        self._dirty[window] = False

    def lend(self, item: int, use: Pollable | None) -> None:
        """End ``edit``, or ``mark``, without a write: the window is free for another item once ``use`` has ended."""
        window = self.window(item)
        self._settle(window)
        self._works[window] = use
        self._holds[window], self._dirty[window] = -1, False

    def discard(self, item: int) -> None:
        """Empty the item's window, whatever it holds. Waits; drops errors."""
        window = self.window(item)
        with suppress(Exception):
            self._settle(window)
        self._holds[window], self._dirty[window] = -1, False

    # --- past the windows -------------------------------------------------------------------------------------

    def read_into(self, item: int, out: torch.Tensor) -> WorkGroup:
        """Start to read the item from the drive into ``out``, of its bytes: the last write of it."""
        works = WorkGroup()
        self._start(works, item, out, self._swap.read)
        return works

    def read_part_into(self, item: int, begin: int, out: torch.Tensor) -> None:
        """Read bytes of the item from ``begin`` on into ``out``, flat uint8. Waits. Keys are read whole: those at the
        ends through separate memory. Raises: OSError."""
        works, ends, first, end = WorkGroup(), [], 0, begin + out.numel()
        for key, nbytes in self._keys(item):
            low, high = max(first, begin), min(first + nbytes, end)
            if low < high:
                into = out[low - begin : high - begin]
                if high - low < nbytes:
                    whole = torch.empty(nbytes, dtype=torch.uint8)
                    ends.append((into, whole[low - first : high - first]))
                    into = whole
                works.add(self._swap.read(key, into.data_ptr(), nbytes))
            first += nbytes
        works.wait()
        for into, found in ends:
            into.copy_(found)

    # --- all --------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Start the writes of dirty windows."""
        for item, dirty in zip(self._holds, self._dirty, strict=True):
            if dirty:
                self.write(item)

    def settle(self) -> None:
        """Wait until nothing is pending. Raises: the first error, once all has ended."""
        failed: Exception | None = None
        for window in range(len(self._works)):
            try:
                self._settle(window)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def finish(self) -> None:
        """Write dirty items, and wait until all are on the drive. Raises: OSError."""
        self.flush()
        self.settle()

    def forget(self) -> None:
        """Empty all windows, dirty ones too. Waits until the swap file is idle; drops errors."""
        with suppress(Exception):
            self.settle()
        drain(self._swap)  # an interrupt, or an error that is kept, may have operations that no window has
        self._empty()

    def erase(self, lost: bool = False) -> None:
        """Make all items zeros, as at the start, without moving bytes. lost: the caller was interrupted, or got an
        error. No key with a failed write remains."""
        try:
            self.settle()
        except Exception:
            lost = True
        if lost:
            drain(self._swap)
            for item in range(len(self._stored)):
                for key, nbytes in self._keys(item):
                    self._swap.release(key)
                    self._swap.reserve(key, nbytes)
        self._empty()
        self._stored = bytearray(len(self._stored))

    def close(self) -> None:
        """Wait until the swap file is idle, and drop the memory."""
        self.forget()
        self._windows.clear()

    # --- one window -------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        count = len(self._works)
        self._reads, self._holds, self._dirty = [False] * count, [-1] * count, [False] * count

    def _vacate(self, window: int) -> None:
        """Empty a window: its item, if dirty, is on the drive."""
        if self._dirty[window]:
            self.write(self._holds[window])
        self._settle(window)
        self._holds[window] = -1

    def _settle(self, window: int) -> None:
        """Wait for the window's pending operation. Raises: its error; the window is empty then."""
        work = self._works[window]
        if work is None:
            return
        try:
            self._stalls.wait(work)
        except Exception:
            self._works[window], self._reads[window] = None, False
            self._holds[window], self._dirty[window] = -1, False
            raise
        self._works[window], self._reads[window] = None, False

    def _start(
        self, works: WorkGroup, item: int, memory: torch.Tensor, act: Callable[[str, int, int], _core.Work]
    ) -> None:
        begin, address = 0, memory.data_ptr()
        for key, nbytes in self._keys(item):
            works.add(act(key, address + begin, nbytes))
            begin += nbytes


class Sweep:
    """One pass over ``items`` in their order: each is read ahead, changed in its window, and written behind.

    depth: reads in flight. then: items that are needed after the pass; their reads begin at its end.
    The caller takes each item by ``take`` and ends it by ``write``.
    """

    def __init__(self, cache: SpanCache, items: Sequence[int], depth: int, then: Sequence[int] = ()) -> None:
        self._cache, self._items, self._depth = cache, items, depth
        self._then = deque(then)
        self._begun = self._taken = 0  # items with a read that was started; that the caller has taken
        self._read_some()

    def take(self) -> torch.Tensor:
        """Wait for the next item. Returns: its memory, to be changed until ``write``. Raises: OSError."""
        self._taken += 1
        return self._cache.edit(self._items[self._taken - 1])

    def write(self) -> None:
        """Start to write the item that was taken last, and to read further ones."""
        self._cache.write(self._items[self._taken - 1])
        if self._begun < len(self._items):
            self._read_some()
        elif self._then:
            self._read_after()

    def _conflicts(self, item: int) -> bool:
        """Return True if an item that was begun, and not taken, has the same window."""
        window = self._cache.window(item)
        return any(self._cache.window(each) == window for each in self._items[self._taken : self._begun])

    def _read_some(self) -> None:
        """Start to read the next items. An item is read later if its window is in use: some items have gaps."""
        while self._begun < len(self._items) and self._begun - self._taken < self._depth:
            item = self._items[self._begun]
            if self._conflicts(item):
                return
            self._cache.prefetch(item)
            self._begun += 1

    def _read_after(self) -> None:
        """Start to read an item that is needed after the pass, unless one of the pass still has its window."""
        if self._cache.pending_reads >= self._depth or self._conflicts(self._then[0]):
            self._then.clear()
            return
        self._cache.prefetch(self._then.popleft())


def drain(swap: _core.SwapFile) -> None:
    """Wait until nothing is in flight, before its memory is freed or reused. Drops errors that no ``Work.wait()`` has
    raised."""
    while True:
        try:
            swap.wait()
            return
        except OSError:  # one of those errors, which then counts as raised
            continue
        except RuntimeError:  # a forked child: the operations are its parent's
            return
