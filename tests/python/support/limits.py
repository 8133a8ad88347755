"""Limits that distinguish a hang from slow work. They assert no speed: on a loaded machine they are longer."""

from __future__ import annotations

import os
import time

MOST = 4.0


class Limit:
    """``seconds`` from now on, and up to MOST times as long while more than two processes wait for each core."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._begin = seconds, time.monotonic()

    def left_s(self) -> float:
        """Return the remaining seconds under the load of the last minute; 0: none."""
        load = os.getloadavg()[0] / (2 * len(os.sched_getaffinity(0)))
        until = self._begin + self.seconds * min(MOST, max(1.0, load))
        return max(0.0, until - time.monotonic())
