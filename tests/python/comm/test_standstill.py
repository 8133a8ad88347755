"""Ranks that wait for each other in two communicators: an error names both sides, long before the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero.worker import Worker

Run = Callable[..., list[Any]]
_LONG_S = 2.5  # longer than detection of a standstill takes


def wait_for_each_other() -> None:
    comm = zcomm.init(timeout=120)
    one, other, third = (comm.duplicate() for _ in range(3))
    for each in (one, other, third):  # before its first use, a communicator's calling threads are unknown
        each.barrier()
    words = r"wait for each other: rank 0: barrier 'one' at .*; rank 1: all_reduce float32 sum count=3 'other' at test_"
    with pytest.raises(zcomm.CollectiveMismatch, match=words):
        if comm.rank == 0:
            one.barrier(name="one")
        else:
            other.all_reduce(torch.ones(3), name="other")
    for broken in (one, other):
        with pytest.raises(zcomm.CollectiveMismatch, match="rank 0: barrier 'one"):
            broken.barrier()
    with pytest.raises(zcomm.CollectiveMismatch, match=r"rank 0: barrier 'async' at .*; rank 1: barrier 'of a worker'"):
        if comm.rank == 0:
            comm.barrier(name="async", async_op=True).wait()
        else:
            worker = Worker("test-worker")
            try:
                worker.submit(third.barrier, "of a worker").result()
            finally:
                worker.close()


def test_ranks_that_wait_in_two_communicators(run_ranks: Run) -> None:
    run_ranks(wait_for_each_other, 2)


def come_late() -> None:
    """Wait in one communicator while other threads are about to enter two more."""
    comm = zcomm.init(timeout=120)
    by_worker, by_thread = comm.duplicate(), comm.duplicate()
    by_worker.barrier()
    first = threading.Thread(target=by_thread.barrier)
    first.start()
    first.join()
    if comm.rank == 1:
        by_worker.barrier()
        by_thread.barrier()
        comm.barrier()
        return
    worker = Worker("test-worker")

    def late(barrier: Callable[[], None]) -> None:
        time.sleep(_LONG_S)
        barrier()

    worker.submit(late, by_worker.barrier)
    thread = threading.Thread(target=late, args=(by_thread.barrier,))
    thread.start()
    comm.barrier()
    thread.join()
    worker.close()


def test_threads_that_come_late_are_waited_for(run_ranks: Run) -> None:
    run_ranks(come_late, 2)


def go_on_after_a_time() -> None:
    """Wait for some time in one communicator, and then in another."""
    comm = zcomm.init(timeout=120)
    one, other = _used(comm), _used(comm)
    if comm.rank == 0:
        work = one.barrier(async_op=True)
        with pytest.raises(TimeoutError):
            work.wait(timeout=_LONG_S)
        other.barrier()
        work.wait()
    else:
        other.barrier()
        one.barrier()


def go_on_while_a_thread_waits() -> None:
    """Wait for a worker on a thread other than the owner's, while the owner continues."""
    comm = zcomm.init(timeout=120)
    one, other = _used(comm), _used(comm)
    worker = Worker("test-worker")

    def call_by_worker() -> None:
        time.sleep(_LONG_S * comm.rank)
        worker.submit(one.barrier).result()

    thread = threading.Thread(target=call_by_worker)
    thread.start()
    time.sleep(_LONG_S * (1 - comm.rank))
    other.barrier()
    thread.join()
    worker.close()


def go_on_by_a_worker() -> None:
    """Call by a worker that another thread than the owner feeds."""
    comm = zcomm.init(timeout=120)
    one, other = _used(comm), _used(comm)
    if comm.rank == 1:
        one.barrier()
        one.barrier()
        other.barrier()
        return
    worker = Worker("test-worker")

    def feed(after_s: float) -> None:
        time.sleep(after_s)
        worker.submit(one.barrier).result()

    first, late = (threading.Thread(target=feed, args=(after_s,)) for after_s in (0.0, _LONG_S))
    first.start()
    first.join()
    late.start()
    other.barrier()
    late.join()
    worker.close()


def _used(comm: zcomm.Communicator) -> zcomm.Communicator:
    """Return a new communicator that the owner's thread has called."""
    new = comm.duplicate()
    new.barrier()
    return new


@pytest.mark.parametrize("body", [go_on_after_a_time, go_on_while_a_thread_waits, go_on_by_a_worker])
def test_owners_that_go_on_are_waited_for(run_ranks: Run, body: Callable[[], None]) -> None:
    run_ranks(body, 2)


def differ_in_calls(stage: int, folder: str) -> None:
    """Rank 0 saves, or waits in a barrier, while rank 1 continues with a forward and a step."""
    rank = zcomm.init(timeout=120).rank
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=stage, share_parameters=stage < 3)
    with pytest.raises(zcomm.CollectiveMismatch, match=r"wait for each other: rank 0: .*; rank 1: "):
        if rank == 0:
            opt.save(folder) if stage == 3 else zcomm.barrier()
        else:
            model(x).sum().backward()
            opt.step()
    opt.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_save_and_train(run_ranks: Run, tmp_path: Any, stage: int) -> None:
    run_ranks(differ_in_calls, 2, stage, str(tmp_path / "c"))
