"""Jobs between hosts that are separate to the kernel: network namespaces with cables (skipped without root).

Addresses by the route to the master and by interface, IPv4 and IPv6; values; parts of a job; a cable that is cut.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from networks import Networks, enter, networks

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
PORT = 29511  # each namespace has all ports free


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Networks]:
    with networks(2) as made:
        yield made


def move_in(made: Networks, ranks_per_host: int) -> int:
    rank = int(os.environ["RANK"])
    enter(made.names[rank // ranks_per_host])
    return rank


def check(comm: zcomm.Communicator) -> None:
    """Check sums of small integers, above and below each size at which algorithms change."""
    for count in (0, 1, 7, 1001, 300_007):
        tensor = torch.arange(count, dtype=torch.float32) % 61 + comm.rank
        comm.all_reduce(tensor)
        extra = sum(range(comm.world_size))
        assert torch.equal(tensor, (torch.arange(count, dtype=torch.float32) % 61) * comm.world_size + extra)
    assert comm.all_gather(torch.tensor([comm.rank])).tolist() == list(range(comm.world_size))


def job(made: Networks, ranks_per_host: int, master: str, env: dict[str, str]) -> tuple[str, int, int, str]:
    rank = move_in(made, ranks_per_host)
    os.environ.update(env)
    address = f"[{master}]" if ":" in master else master
    method = os.environ["ZCOMM_INIT_METHOD"] if "MASTER_ADDR" in env else f"tcp://{address}:{PORT}"
    comm = zcomm.init(timeout=30, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), init_method=method)
    check(comm)
    return comm.backend, comm.local_rank, comm.local_world_size, comm.describe()


@pytest.mark.parametrize(
    ("master", "env", "interface", "ranks_per_host"),
    [
        ("slow", {}, "slow0 10.231.77.", 2),
        ("fast6", {}, "fast0 fd00:231::", 2),
        ("slow", {"MASTER_ADDR": "10.231.78.1"}, "fast0 10.231.78.", 1),
        ("slow", {"MASTER_ADDR": "10.231.77.1", "ZCOMM_SOCKET_IFNAME": "fast0"}, "fast0 10.231.78.", 1),
        ("slow", {"MASTER_ADDR": "10.231.77.1", "ZCOMM_PORT_RANGE": "40000-40100"}, "slow0 10.231.77.", 2),
    ],
    ids=["route", "ipv6", "file store", "interface", "ports"],
)
def test_two_hosts(
    master: str, env: dict[str, str], interface: str, ranks_per_host: int, two_hosts: Networks, run_ranks: Run
) -> None:
    where = getattr(two_hosts, master)(0)
    results = run_ranks(job, 2 * ranks_per_host, two_hosts, ranks_per_host, where, env)
    for rank, (backend, local_rank, local_world_size, told) in enumerate(results):
        assert backend == ("hierarchical" if ranks_per_host > 1 else "tcp")
        assert (local_rank, local_world_size) == (rank % ranks_per_host, ranks_per_host)
        assert told.endswith(f"{interface}{rank // ranks_per_host + 1}"), told


def uneven_job(made: Networks) -> tuple[str, int]:
    """Join two ranks on one host and one on the other; then split by host, and across hosts."""
    rank = int(os.environ["RANK"])
    enter(made.names[rank // 2])
    os.environ["MASTER_ADDR"] = made.slow(0)
    comm = zcomm.init(timeout=30, rank=rank, world_size=3, init_method=os.environ["ZCOMM_INIT_METHOD"])
    check(comm)
    part = comm.split(rank // 2)
    assert part is not None
    check(part)
    assert part.backend == "shm"
    across = comm.split(0 if rank != 0 else None)
    if across is not None:
        assert across.backend == "tcp"
        check(across)
    comm.barrier()
    return comm.backend, comm.local_world_size


def test_uneven_hosts_and_parts(two_hosts: Networks, run_ranks: Run) -> None:
    assert run_ranks(uneven_job, 3, two_hosts) == [("tcp", 2), ("tcp", 2), ("tcp", 1)]


def wait_in_a_barrier(made: Networks, folder: str) -> str:
    rank = move_in(made, 1)
    os.environ["MASTER_ADDR"] = made.slow(0)
    comm = zcomm.init(timeout=4, rank=rank, world_size=2, init_method=os.environ["ZCOMM_INIT_METHOD"])
    comm.barrier()
    Path(folder, f"joined{rank}").touch()
    while not Path(folder, "cut").exists():
        time.sleep(0.02)
    try:
        comm.barrier()
    except (zcomm.PeerLost, TimeoutError) as error:
        return str(error)
    return "nothing"


def test_a_cable_that_is_cut_ends_at_the_deadline(run_ranks: Run, start_ranks_in: Any, tmp_path: Path) -> None:
    with networks(2) as made:
        world = start_ranks_in(wait_in_a_barrier, 2, made, str(tmp_path))
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("joined*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        made.cut(1)
        (tmp_path / "cut").touch()
        for rank, result in enumerate(world.join(60)):
            assert result.value is not None and f"rank {1 - rank}" in result.value, result.describe()
