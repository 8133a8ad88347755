"""The test frame: values, errors and exit codes of ranks reach the test, and a stuck rank shows its stack."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest


def returns() -> tuple[int, str]:
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"]


def rank_1_raises() -> None:
    if os.environ["RANK"] == "1":
        raise FileNotFoundError(2, "nothing there")


def rank_1_dies() -> str:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def rank_1_is_stuck_here() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1000)


def test_values_come_back_by_rank(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(returns, 3) == [(0, "3"), (1, "3"), (2, "3")]


def test_an_error_fails_the_test_unless_asked_for(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1(?s:.*)nothing there"):
        run_ranks(rank_1_raises, 2)
    good, bad = run_ranks(rank_1_raises, 2, check=False)
    assert good.error is None and good.exitcode == 0
    assert bad.error.kinds[:2] == ("FileNotFoundError", "OSError") and bad.error.errno == 2


def test_a_killed_rank_is_seen(run_ranks: Callable[..., list[Any]]) -> None:
    alive, dead = run_ranks(rank_1_dies, 2, check=False)
    assert alive.value == "alive"
    assert dead.exitcode == -signal.SIGKILL and dead.value is None
    with pytest.raises(pytest.fail.Exception, match="exit code -9"):
        run_ranks(rank_1_dies, 2)


def test_a_stuck_rank_is_killed_and_shows_its_stack(run_ranks: Callable[..., list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"ranks \[1\] still ran(?s:.*)rank_1_is_stuck_here"):
        run_ranks(rank_1_is_stuck_here, 2, timeout_s=3.0)


def test_a_thread_that_is_not_pythons_may_stay() -> None:
    """Threads like autograd's device threads: code that asks for the current thread (logging does) registers them."""
    seen = threading.Event()
    _thread.start_new_thread(lambda: (threading.current_thread(), seen.set()), ())
    assert seen.wait(10)
    assert any(isinstance(thread, threading._DummyThread) for thread in threading.enumerate())
