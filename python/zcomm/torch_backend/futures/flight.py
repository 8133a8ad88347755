"""Flight: the works of a process group that have not ended.

Thread rule: any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zcomm.torch_backend.futures.work import Pending


class Flight:
    """Works in flight, so that the program need not hold them: a Work may be dropped, and the operation goes on.

    Some copy results to where the program wants them when they are finished. Those that ended before another operation
    are finished before that one is. So a program that dropped them finds their results then, and not later.
    """

    def __init__(self) -> None:
        self._works: dict[Pending, None] = {}
        self._copying: dict[Pending, None] = {}
        self._limit = 16
        self.number = 0  # of works that there have been

    @property
    def has_copies(self) -> bool:
        return bool(self._copying)

    def add(self, work: Pending, copies: bool = False) -> None:
        for oldest in list(self._works)[:1]:
            self._look_at(oldest)
        if len(self._works) >= self._limit:
            for other in list(self._works):
                self._look_at(other)
            self._limit = max(16, 2 * len(self._works))
        self._works[work] = None
        self.number += 1
        work.number = self.number
        if copies:
            self._copying[work] = None

    @staticmethod
    def _look_at(work: Pending) -> None:
        """Poll a work, which may have been dropped, so that nothing waits for it. The completer polls Futures."""
        if not work.has_future:
            work.poll()

    def finish_up_to(self, number: int, later_is_collective: bool = True) -> None:
        """Finish the copies of the works up to ``number`` that ended before an operation which has ended.

        Messages keep no order with other operations: those that have ended.
        """
        for work in list(self._copying):
            if work.number > number:
                return
            if later_is_collective and work.is_collective and work.has_begun():
                work.finish()  # at once: it has ended
            else:
                work.poll()

    def finish_collectives(self) -> None:
        """Wait for the collectives with copied results, and finish them: all ranks have called them."""
        for work in list(self._copying):
            if work.is_collective:
                work.finish()

    def discard(self, work: Pending) -> None:
        self._works.pop(work, None)
        self._copying.pop(work, None)

    def close(self) -> None:
        """Settle every work. The communicator has been closed: they end now."""
        for work in list(self._works):
            work.finish()
