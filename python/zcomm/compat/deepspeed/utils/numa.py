"""``deepspeed.utils.numa``: lists of cores, and the command that binds a process to its part of them."""

from __future__ import annotations

import os
import shutil

from zcomm.launch.cores import parse_range as parse_range
from zcomm.launch.cores import parse_range_list as parse_range_list


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node; one list of all cores if Linux lists no nodes."""
    nodes = []
    for index in range(1024):
        place = f"/sys/devices/system/node/node{index}/cpulist"
        if not os.path.exists(place):
            break
        with open(place) as lines:
            text = lines.read().strip()
        nodes.append(parse_range_list(text) if text else [])
    return nodes or [list(range(os.cpu_count() or 1))]


def check_for_numactl_pkg() -> bool:
    """Return True if the program numactl is installed."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return how many cores rank ``local_rank`` gets, and the numactl command that binds it to them.

    Raises: ValueError for fewer cores than ranks; FileNotFoundError without the program numactl.
    """
    allowed = sorted(os.sched_getaffinity(0)) if bind_core_list is None else parse_range_list(bind_core_list)
    count = len(allowed) // num_local_procs
    if count < 1:
        raise ValueError(f"{len(allowed)} cores do not suffice for {num_local_procs} ranks on this host")
    if not check_for_numactl_pkg():
        raise FileNotFoundError("numactl is not installed: install it, or leave out the binding to cores")
    mine = allowed[count * local_rank : count * (local_rank + 1)]
    return count, ["numactl", "-C", ",".join(map(str, mine))]
