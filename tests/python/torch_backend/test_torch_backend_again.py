"""Groups that are destroyed and made again, while ranks are early or late: each has a store of its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_LATE_S = 0.15


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _again(port: int) -> None:
    number = int(os.environ["RANK"])
    import zcomm.torch_backend  # noqa: F401

    def end_in_a_child(part: Any) -> None:
        """End the groups in a forked child: then rank 0 has not left."""
        if (child := os.fork()) == 0:
            try:
                dist.destroy_process_group()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        dist.barrier(part)
        group = dist.group.WORLD
        assert group is not None and not group.get_group_store().check(["left"])

    rounds = [
        # backend, what a rank is late for, which rank, how far the ranks' numbers have moved on
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
            os.environ["ZCOMM_JOB_ID"] = "again"  # without it rank 0 looks out for other jobs: that takes a second
        rank = (number + shift) % 2
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group(backend, where, timedelta(seconds=30), rank=rank, world_size=2)
        store = dist.distributed_c10d._get_default_store()
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
