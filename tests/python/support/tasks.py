"""Native threads of this process. The kernel lists a joined thread for a moment after its join has returned."""

from __future__ import annotations

import os
import time

from limits import Limit


def tasks(at_most: int | None = None) -> int:
    """Count native threads. at_most: count again until there are no more, or the time for a hang has passed."""
    limit = Limit(5.0)
    while (count := len(os.listdir("/proc/self/task"))) > (count if at_most is None else at_most) and limit.left_s():
        time.sleep(0.02)
    return count
