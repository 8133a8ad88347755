"""drain: wait until a swap file is idle, so that memory that it reads or writes may be freed.

Thread rule: any thread.
"""

from __future__ import annotations

from zcomm import _core


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
