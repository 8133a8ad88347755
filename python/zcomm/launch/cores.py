"""Lists of cores, and which of them a rank is bound to."""

from __future__ import annotations

import os
from itertools import pairwise


def parse_range(rng: str) -> list[int]:
    """Return the cores of "3" or "2-5". Raises: ValueError."""
    first, dash, last = rng.partition("-")
    try:
        start, end = int(first), int(last) if dash else int(first)
    except ValueError:
        raise ValueError(f"{rng!r} is not a core or a range of cores such as 2-5") from None
    if start > end:
        raise ValueError(f"the range {rng!r} ends before it starts")
    return list(range(start, end + 1))


def parse_range_list(range_str: str) -> list[int]:
    """Return the cores of a list such as "0,4-7". Raises: ValueError, also if they are not in ascending order."""
    cores = [core for part in range_str.split(",") for core in parse_range(part)]
    if any(later <= earlier for earlier, later in pairwise(cores)):
        raise ValueError(f"the cores of {range_str!r} do not rise")
    return cores


def cores_of(listed: str | None, count: int, local_rank: int) -> list[int]:
    """Return the cores of rank ``local_rank`` of ``count`` on this host: equal parts, in order.

    listed: "0,4-7"; None or "": all that this process may use.
    Raises: ValueError for fewer cores than ranks, and for cores that this process may not use.
    """
    usable = sorted(os.sched_getaffinity(0))
    cores = parse_range_list(listed) if listed else usable
    if missing := sorted(set(cores) - set(usable)):
        raise ValueError(f"--bind_core_list {listed}: core {missing[0]} cannot be used; this process may use {usable}")
    each = len(cores) // count
    if each < 1:
        raise ValueError(f"{len(cores)} cores do not suffice for {count} ranks on this host")
    return cores[each * local_rank : each * (local_rank + 1)]
