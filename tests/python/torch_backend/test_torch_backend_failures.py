"""Failures over "zcomm" end in an error on every rank, and never in waiting for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_world import world


def _dies() -> float:
    """Rank 1 dies; the others are inside of an all_reduce."""
    with world(timeout_s=60.0) as (rank, _size):
        dist.all_reduce(torch.ones(10))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        try:
            dist.all_reduce(torch.ones(10))
        except ConnectionError as error:
            assert error.rank == 1  # type: ignore[attr-defined]
            with pytest.raises(ConnectionError):
                dist.all_reduce(torch.ones(10))
            return time.monotonic() - started
    raise AssertionError("all_reduce with a dead rank succeeded")


def test_a_dead_rank_ends_a_collective(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(_dies, 3, check=False)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].error is None and results[rank].value < 30, results[rank].describe()


def _dies_under_ddp() -> None:
    with world(timeout_s=60.0) as (rank, _size):
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        net(torch.ones(1, 4)).sum().backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        net(torch.ones(1, 4)).sum().backward()


def test_a_dead_rank_ends_a_backward_pass(run_ranks: Callable[..., list[Any]]) -> None:
    """DDP waits for Futures only: the error comes through them, as a RuntimeError with the core's words."""
    result = run_ranks(_dies_under_ddp, 2, check=False)[0]
    assert result.error is not None and "rank 1" in result.error.message, result.describe()


def _late() -> str:
    with world(timeout_s=1.0) as (rank, _size):
        try:
            if rank == 0:
                dist.barrier()
            else:
                time.sleep(3)
                dist.all_reduce(torch.ones(1))
        except (TimeoutError, RuntimeError) as error:
            return str(error)
    return "no error"


def test_a_late_rank_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    texts = run_ranks(_late, 2)
    assert "rank 1" in texts[0] and "timeout" in texts[0], texts
    assert texts[1] != "no error"


def _call_timeout() -> str:
    """Give one call a shorter timeout."""
    with world(timeout_s=60.0) as (rank, _size):
        if rank == 1:
            with pytest.raises((RuntimeError, ConnectionError)):
                time.sleep(2)
                dist.barrier()
            return ""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=0.5)
        with pytest.raises(TimeoutError, match=r"0\.5 s"):
            dist.group.WORLD.barrier(options).wait()
        with pytest.raises(RuntimeError, match="closed"):
            dist.all_reduce(torch.ones(1))
        return "late"


def test_a_call_has_its_own_timeout(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_call_timeout, 2) == ["late", ""]


def _wait_timeout() -> None:
    """wait(timeout) that passes leaves the operation alone."""
    with world(timeout_s=60.0) as (rank, size):
        store = dist.distributed_c10d._get_default_store()
        tensor = torch.ones(3)
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            with pytest.raises(TimeoutError):
                work.wait(timedelta(seconds=0.2))
            assert not work.is_completed()
            store.set("waited", "yes")
            work.wait()
        else:
            store.wait(["waited"])
            dist.all_reduce(tensor)
        assert tensor.tolist() == [size] * 3


def test_wait_with_a_timeout(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_wait_timeout, 2)


def _mismatch() -> tuple[str, str]:
    with world() as (rank, _size):
        try:
            dist.all_reduce(torch.ones(3 + rank))
        except RuntimeError as error:
            return type(error).__name__, str(error)
    return "", ""


def test_different_calls_are_compared(run_ranks: Callable[..., list[Any]]) -> None:
    for kind, text in run_ranks(_mismatch, 2):
        assert kind == "CollectiveMismatch" and "3" in text and "4" in text and "test_torch_backend" in text, text


def _monitored() -> str:
    with world() as (rank, size):
        short = timedelta(seconds=0.5)
        text = ""
        if rank in (0, 3):
            with pytest.raises(TimeoutError) as caught:
                dist.monitored_barrier(timeout=short if rank == 0 else timedelta(seconds=30), wait_all_ranks=True)
            text = str(caught.value)
        dist.barrier()
        dist.monitored_barrier()  # the group is as good as before
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size
        return text


def test_monitored_barrier_names_the_missing(run_ranks: Callable[..., list[Any]]) -> None:
    texts = run_ranks(_monitored, 4)
    assert "Ranks 1, 2 failed" in texts[0], texts
    assert "rank 0" in texts[3] and "Ranks 1, 2 failed" in texts[3], texts


def _makes_a_group_alone() -> tuple[str, float]:
    """Rank 2 dies while rank 0 waits for rank 2, and rank 1 has done its part of a group without rank 2."""
    with world(timeout_s=60.0) as (rank, _size):
        part = dist.new_group([0, 1])
        dist.barrier()
        if rank == 2:
            time.sleep(0.5)
            os._exit(0)
        started = time.monotonic()
        text = "nothing"
        try:
            dist.new_group([0, 1, 2])
        except ConnectionError as error:
            text = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - started
        other = dist.new_group([0, 1], use_local_synchronization=True)
        for group in (part, other):
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            assert value == 2
        return text, took_s


def test_new_group_ends_when_a_rank_of_it_has_died(run_ranks: Callable[..., list[Any]]) -> None:
    for result in run_ranks(_makes_a_group_alone, 3, check=False)[:2]:
        assert result.value is not None, result.describe()
        text, took_s = result.value
        assert text.startswith("PeerLost: init: rank 2 of the job ended") and took_s < 20, (text, took_s)


def _interrupted_in_new_group() -> float:
    """Rank 1 comes when rank 0's handler has raised."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with world(timeout_s=60.0) as (rank, _size):
        store = dist.distributed_c10d._get_default_store()
        took_s = 0.0
        if rank == 0:
            signal.signal(signal.SIGTERM, handler)
            sent = time.monotonic() + 0.5
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(KeyboardInterrupt):
                dist.new_group([0, 1])
            took_s = time.monotonic() - sent
            store.set("interrupted", "yes")
        else:
            store.wait(["interrupted"])
        return took_s


def test_a_handler_runs_in_new_group(run_ranks: Callable[..., list[Any]]) -> None:
    assert max(run_ranks(_interrupted_in_new_group, 2)) < 20
