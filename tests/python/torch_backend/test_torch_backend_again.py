"""Groups that are destroyed and made again, while ranks are early or late: each group has its own store."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zcomm.torch_backend import store_end

_LATE_S = 0.15


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _again(port: int) -> None:
    number = int(os.environ["RANK"])
    import zcomm.torch_backend  # noqa: F401

    def end_in_a_child(part: Any) -> None:
        """End the groups in a forked child, which must not count as rank 0's departure."""
        if (child := os.fork()) == 0:
            try:
                dist.destroy_process_group()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        dist.barrier(part)
        server = store_end._served_by_rank_0(c10d._get_default_store())
        assert server is not None and not server.check([store_end._LEFT])

    rounds = [
        # backend, step at which a rank is late, which rank, shift of the ranks' numbers
        ("zcomm", "next", 0, 0),
        ("zcomm", "destroy", 0, 0),
        ("gloo", "next", 1, 0),  # Gloo's rank 1 does not wait for the end of rank 0's store
        ("zcomm", "next", 1, 0),
        ("zcomm", "destroy", 1, 0),
        ("zcomm", "destroy", 0, 1),
        ("gloo", "", 0, 1),
    ]
    for done, (backend, late_for, late, shift) in enumerate(rounds):
        if done == 2:
            os.environ["ZCOMM_JOB_ID"] = "again"  # without it rank 0 looks for other jobs, which takes a second
        rank = (number + shift) % 2
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, where, timedelta(seconds=30), rank=rank, world_size=2)
        store = c10d._get_default_store()
        assert not store.check(["value"]), f"round {done}, {backend}: the store of an earlier group"
        part = dist.new_group([0, 1], backend="zcomm")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == 4
        dist.barrier()
        store.set("value", "old")
        if done == 1:
            end_in_a_child(part)
        del store, part
        if late_for == "destroy" and rank == late:
            time.sleep(_LATE_S)
        dist.destroy_process_group()
        if late_for == "next" and rank == late:
            time.sleep(_LATE_S)


def test_groups_made_again_by_early_and_late_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_again, 2, _free_port())


def _slow_release(port: int) -> None:
    """Make two groups, each served by another rank. Rank 0 of the first is slow between its goodbye and its end."""
    number = int(os.environ["RANK"])
    import zcomm.torch_backend  # noqa: F401

    release = c10d._update_default_pg

    def slowly(group: Any) -> None:  # as a process that waits for a core
        if group is None:
            time.sleep(1.0)
        release(group)

    for shift in (0, 1):
        rank = (number + shift) % 2
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("zcomm", where, timedelta(seconds=30), rank=rank, world_size=2)
        dist.barrier()
        c10d._update_default_pg = slowly if rank == 0 and shift == 0 else release
        dist.destroy_process_group()


def test_no_rank_goes_on_before_the_store_has_ended(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_slow_release, 2, _free_port())


def _held(port: int) -> list[float]:
    """Return the seconds in which three groups end. The program holds their store, and uses it for the next group."""
    number, seconds = int(os.environ["RANK"]), []
    import zcomm.torch_backend  # noqa: F401

    store = dist.TCPStore("127.0.0.1", port, 2, number == 0, timedelta(seconds=30))
    for turn in range(3):
        part = dist.PrefixStore(str(turn % 2), store)
        dist.init_process_group("zcomm", store=part, rank=number, world_size=2)
        del part
        dist.barrier()
        before = time.monotonic()
        dist.destroy_process_group()
        seconds.append(time.monotonic() - before)
        store.add("turn", 1)
        while store.add("turn", 0) < 2 * (turn + 1):
            time.sleep(0.01)
    return seconds


def test_a_store_that_the_program_holds_is_not_waited_for(run_ranks: Callable[..., list[Any]]) -> None:
    for seconds in run_ranks(_held, 2, _free_port()):
        assert sum(seconds) < store_end.RELEASE_S, "each end waits for rank 0's word, and for no time"
