"""Completer: finishes works with Futures that are waited for, so that nothing else need.

Collectives end in call order: it waits for the oldest that has been started. Messages do not: with ``any_order`` it
goes round.
One thread leads: it waits for works. It hands the lead over before it completes a Future, because callbacks run inside
of that, and may wait for other Futures. Callbacks on a collective's own Future have a thread of their own
(callbacks.py). Invariant: while works are in the queue some thread leads, or is about to.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from zcomm.torch_backend.futures.callbacks import Callbacks
from zcomm.torch_backend.futures.threads import LINGER_S, Server

if TYPE_CHECKING:
    from zcomm.torch_backend.futures.work import Pending

_SLICE_S = 0.005


class Completer(Server):
    """Threads that finish works.

    callbacks: what runs those of the works' Futures; None: they run where the Future is completed.
    """

    def __init__(self, any_order: bool, callbacks: Callbacks | None = None) -> None:
        super().__init__()
        self.callbacks = callbacks
        self._any_order = any_order
        self._works: dict[Pending, None] = {}
        self._leader: threading.Thread | None = None
        self._idle = 0
        self._is_open = True
        if callbacks is not None:
            callbacks.on_begun = self._look_again

    def add(self, work: Pending) -> None:
        with self._changed:
            self._works[work] = None
            if self._leader is None:
                self._wake()

    def close(self) -> None:
        """Join the threads. The works must be about to end: their communicator has been closed."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._join()

    def _look_again(self) -> None:
        """Wake a thread: a work that had been deferred has been started."""
        with self._changed:
            if self._works and self._leader is None:
                self._wake()

    def _wake(self) -> None:
        if self._idle > 0:
            self._changed.notify()
        else:
            self._start(self._serve)

    def _serve(self) -> None:
        while works := self._lead():
            for work in works:
                if not self._finish(work):
                    break
            else:
                with self._changed:
                    self._leader = None
            del work, works  # while the thread waits for the next one, this one's tensors can go

    def _lead(self) -> list[Pending]:
        """Return the works that this thread, as the leader, waits for next; none: the thread may end."""
        with self._changed:
            while True:
                if self._leader is None:
                    begun = [work for work in self._works if work.has_begun()]
                    if begun:
                        self._leader = threading.current_thread()
                        return begun if self._any_order else begun[:1]
                if not self._is_open and not self._works:
                    return []
                self._idle += 1
                was_woken = self._changed.wait(LINGER_S)
                self._idle -= 1
                if not was_woken and (self._leader is not None or not self._works):
                    return []

    def _finish(self, work: Pending) -> bool:
        """Wait for ``work``; return False if another thread leads now."""
        leads = True

        def hand_over() -> None:
            nonlocal leads
            leads = False
            with self._changed:
                self._works.pop(work, None)
                self._leader = None
                if self._works:
                    self._wake()

        try:
            work.finish_in_background(_SLICE_S if self._any_order else None, hand_over)
        except TimeoutError:
            return True  # a message that has not come: the next one
        if leads:  # another thread has finished it
            with self._changed:
                self._works.pop(work, None)
        return leads

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._works.clear()
        self._leader, self._idle = None, 0
