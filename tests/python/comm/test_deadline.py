"""Deadlines: no_deadline() for slow set-up by one rank, and a late rank's error: rank, call and call site."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from late import init_with_deadline, tell, wait_until_told
from thread_world import thread_world
from tiers import slow
from zcomm.bootstrap.join import Joined

Run = Callable[..., list[Any]]
TIMEOUT_S = 1.0
SLOW_S = 2.6  # more than two deadlines


def outcome(call: Callable[[], object]) -> str:
    """ "fine", or the error with its kind."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def slow_rank(slow: int, suspended: bool, call: str, folder: str) -> str:
    """Call ``call`` late on the slow rank; return each rank's outcome."""
    comm = init_with_deadline(TIMEOUT_S)
    tensor = torch.ones(1000)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(tensor),
        "async": lambda: comm.all_reduce(tensor, async_op=True).wait(),  # type: ignore[union-attr]
        "empty": lambda: comm.empty(10),
        "split": lambda: comm.split(0),
    }
    if comm.rank == slow and suspended:
        with comm.no_deadline():
            time.sleep(SLOW_S)
            return outcome(calls[call])
    if comm.rank == slow:
        wait_until_told(folder, "late", set(range(comm.world_size)) - {slow})
    result = outcome(calls[call])
    tell(folder, "late")
    if not suspended:
        wait_until_told(folder, "late", [slow])  # leaving earlier would cause another error
    return result


@pytest.mark.parametrize("call", ["all_reduce", slow("async"), slow("split")])
def test_nobody_runs_into_the_deadline_of_a_rank_that_has_none(call: str, run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(slow_rank, 3, 0, True, call, str(tmp_path)) == ["fine"] * 3


@pytest.mark.parametrize(("slow", "call"), [(0, "all_reduce"), (1, "async"), (2, "empty")])
def test_without_it_the_late_rank_is_named(slow: int, call: str, run_ranks: Run, tmp_path: Path) -> None:
    word = {"async": "all_reduce", "empty": "allocate"}.get(call, call)
    for rank, message in enumerate(run_ranks(slow_rank, 3, slow, False, call, str(tmp_path))):
        assert message.startswith("TimeoutError: "), message
        assert f"for rank {slow} to enter it" in message and word in message, message
        if rank != slow:
            assert re.search(rf"waited {TIMEOUT_S:g} s", message), message


def here() -> int:
    """Return the caller's line."""
    return sys._getframe(1).f_lineno


def where_ranks_were(folder: str) -> tuple[str, int]:
    """Return the error on the late rank's peer, and the line of the call that the error names."""
    comm = init_with_deadline(TIMEOUT_S)
    with comm.no_deadline():
        line = here() + 1
        comm.barrier()
    if comm.rank == 1:
        wait_until_told(folder, "late", [0])
        return "", line
    with pytest.raises(TimeoutError) as caught:
        line = here() + 1
        comm.all_reduce(torch.ones(1000), name="loss")
    tell(folder, "late")
    return str(caught.value), line


def test_the_message_says_where_the_call_is_and_where_the_late_rank_was_seen(run_ranks: Run, tmp_path: Path) -> None:
    (message, now), (_, last) = run_ranks(where_ranks_were, 2, str(tmp_path))
    waits, seen = message.split("; rank 1 ")
    assert f"all_reduce float32 sum count=1000 'loss' at test_deadline.py:{now} " in waits, message
    assert f"last entered operation 2, barrier at test_deadline.py:{last}" in seen, message


def mismatch_with_lines() -> str:
    zcomm.init(timeout=10.0)
    with pytest.raises(zcomm.CollectiveMismatch) as caught:
        zcomm.all_reduce(torch.ones(4)) if zcomm.rank() == 0 else zcomm.barrier()
    return str(caught.value)


def test_a_mismatch_names_both_lines(run_ranks: Run) -> None:
    for message in run_ranks(mismatch_with_lines, 2):
        assert len(re.findall(r"at test_deadline\.py:\d+", message)) == 2, message


def mismatch_of_executors() -> str:
    comm = zcomm.init(timeout=10.0)
    with ThreadPoolExecutor(1) as pool, pytest.raises(zcomm.CollectiveMismatch) as caught:
        call = comm.all_reduce if comm.rank == 0 else comm.broadcast
        pool.submit(call, torch.ones(4), name="by itself").result()
    return str(caught.value)


def test_an_executor_that_calls_by_itself_is_no_place(run_ranks: Run) -> None:
    for message in run_ranks(mismatch_of_executors, 2):
        assert message.count("'by itself'") == 2 and ".py:" not in message, message


def first_calls_of_threads(folder: str) -> None:
    class Slow:
        """Slow import, during which other threads run."""

        @staticmethod
        def find_spec(*_: Any) -> None:
            time.sleep(0.05)

    def run(joined: Joined) -> None:
        comm = zcomm.Communicator(joined)
        comm.barrier(name="the first call")
        comm.close()

    sys.modules.pop("sysconfig", None)  # so that the code that looks up its paths imports it again
    sys.meta_path.insert(0, Slow)  # type: ignore[arg-type]
    thread_world(3, Path(folder), run)


def test_threads_that_call_at_once_do_not_wait_for_each_other(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(first_calls_of_threads, 1, str(tmp_path), timeout_s=60)


def suspensions_nest(folder: str) -> list[str]:
    comm = init_with_deadline(TIMEOUT_S)
    found = []
    for nested in (True, False):
        if comm.rank == 0:
            with comm.no_deadline():
                with comm.no_deadline():
                    pass
                if nested:
                    time.sleep(SLOW_S)
            if not nested:
                wait_until_told(folder, "late", [1])
        found.append(outcome(comm.barrier))
        if not nested:
            tell(folder, "late")
    wait_until_told(folder, "late", [0])  # leaving earlier would cause another error
    return found


def test_suspensions_nest_and_end(run_ranks: Run, tmp_path: Path) -> None:
    for found in run_ranks(suspensions_nest, 2, str(tmp_path)):
        assert found[0] == "fine" and found[1].startswith("TimeoutError: "), found


def dies_without_deadline() -> tuple[str, float]:
    comm = zcomm.init(timeout=60)
    comm.barrier()
    if comm.rank == 0:
        with comm.no_deadline():
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    return outcome(comm.barrier), time.monotonic() - started


def test_a_rank_that_dies_without_a_deadline_is_noticed(run_ranks: Run) -> None:
    _, second = run_ranks(dies_without_deadline, 2, check=False)
    assert second.value is not None, second.describe()
    message, took_s = second.value
    assert message.startswith("PeerLost: rank 0 died") and took_s < 30, "half of the deadline"


def closed_communicator() -> None:
    comm = zcomm.init()
    part = comm.duplicate()
    part.close()
    with pytest.raises(RuntimeError, match="closed"), part.no_deadline():
        pass
    with comm.no_deadline():
        comm.barrier()


def test_no_deadline_of_a_closed_communicator(run_ranks: Run) -> None:
    run_ranks(closed_communicator, 2)
