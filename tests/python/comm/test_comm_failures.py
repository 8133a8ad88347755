"""A communicator's life and its failures: shutdown frees all resources; mismatched, dead and late ranks are named."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from tasks import tasks


# ---- life of a communicator ----
def footprint(threads: int | None = None) -> dict[str, int]:
    """Count native threads, open descriptors and mapped memfd of this process. threads: there should be no more."""
    gc.collect()
    return {
        "threads": tasks(threads),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "memfd maps": Path("/proc/self/maps").read_text().count("memfd:"),
        "/dev/shm maps": Path("/proc/self/maps").read_text().count("/dev/shm"),
    }


def shutdown_returns_everything(store: str) -> list[dict[str, int]]:
    torch.ones(10).sum()
    seen = [footprint()]
    for turn in range(3):
        zcomm.init(init_method=f"{store}{turn}", rank=int(os.environ["RANK"]), world_size=2)
        tensor = zcomm.empty(1 << 20)
        zcomm.all_reduce(tensor)
        work = zcomm.all_reduce(torch.ones(5), async_op=True)
        work.wait()
        during = footprint()
        assert during["memfd maps"] > 0 and during["/dev/shm maps"] == 0, during
        del tensor, work
        zcomm.shutdown()
        assert not zcomm.is_initialized()
        seen.append(footprint(seen[1]["threads"] if turn else None))
    return seen


def test_shutdown_returns_memory_threads_and_descriptors(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for first, *later in run_ranks(shutdown_returns_everything, 2, f"file://{tmp_path}/store"):
        # The core's worker pool may persist after the first turn, but must not grow.
        assert [seen["descriptors"] for seen in later] == [first["descriptors"]] * 3, (first, later)
        assert all(seen["memfd maps"] == 0 for seen in later), later
        assert all(seen["threads"] <= later[0]["threads"] for seen in later), (first, later)


def test_calls_before_init_say_so() -> None:
    if zcomm.is_initialized():
        zcomm.shutdown()
    with pytest.raises(RuntimeError, match=r"zcomm\.init"):
        zcomm.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"zcomm\.init"):
        zcomm.rank()


def test_init_names_a_bad_argument() -> None:
    with pytest.raises(ValueError, match="carrier-pigeon"):
        zcomm.init(backend="carrier-pigeon")
    with pytest.raises(ValueError, match="rank=3"):
        zcomm.init(rank=3, world_size=2, init_method="file:///tmp/never-made")
    assert not zcomm.is_initialized()


# ---- failures ----
def mismatch(kind: str) -> str:
    zcomm.init(timeout=30.0)
    rank = zcomm.rank()
    zcomm.barrier()
    with pytest.raises(zcomm.CollectiveMismatch) as caught:
        if kind == "count":
            zcomm.all_reduce(torch.ones(100 + 23 * (rank == 1)))
        elif kind == "dtype":
            zcomm.all_reduce(torch.ones(64, dtype=torch.bfloat16 if rank == 1 else torch.float32))
        elif kind == "operation":
            zcomm.all_reduce(torch.ones(64)) if rank == 1 else zcomm.broadcast(torch.ones(64))
        elif kind == "reduction":
            zcomm.all_reduce(torch.ones(64), op="max" if rank == 1 else "sum")
    with pytest.raises(RuntimeError):  # poisoned, and raises
        zcomm.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("count", ["100", "123"]),
        ("dtype", ["float32", "bfloat16"]),
        ("operation", ["all_reduce", "broadcast"]),
        ("reduction", ["sum", "max"]),
    ],
)
def test_mismatch_is_an_error_on_all_ranks(kind: str, named: list[str], run_ranks: Callable[..., list[Any]]) -> None:
    world_size = 3 if kind == "count" else 2
    for message in run_ranks(mismatch, world_size, kind):
        for word in [*named, "rank"]:
            assert re.search(rf"\b{word}", message), f"{word!r} is not named: {message}"


def lose_a_peer(stamp: str, wait_kind: str) -> tuple[int, str, float]:
    """Kill rank 1 by SIGKILL while the others wait for it; return the rank that they lost, and the time."""
    zcomm.init(timeout=60.0)
    rank = zcomm.rank()
    tensor = zcomm.empty(1 << 16)
    for _ in range(5):
        zcomm.all_reduce(tensor)
    if rank == 1:
        time.sleep(0.3)  # the others are inside the next operation by now
        Path(stamp).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zcomm.PeerLost) as caught:
        if wait_kind == "blocking":
            zcomm.all_reduce(tensor)
        else:
            zcomm.all_reduce(torch.ones(1 << 20), async_op=True).wait()
    noticed = time.monotonic()
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises((RuntimeError, ConnectionError)):
        zcomm.barrier()
    zcomm.shutdown()
    assert threading.active_count() == 1
    return caught.value.rank, str(caught.value), noticed


@pytest.mark.parametrize("wait_kind", ["blocking", "async"])
def test_killed_rank_is_named_long_before_the_deadline(
    wait_kind: str, run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    stamp = tmp_path / "killed_at"
    results = run_ranks(lose_a_peer, 3, str(stamp), wait_kind, check=False)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].error is None, results[rank].describe()
        lost, message, noticed = results[rank].value
        assert lost == 1 and re.search(r"rank 1\b", message), message
        assert noticed - float(stamp.read_text()) < 15.0, "a quarter of the deadline"


def late_rank(timeout_s: float) -> str | None:
    zcomm.init(timeout=timeout_s)
    zcomm.barrier()
    if zcomm.rank() == 1:
        time.sleep(3 * timeout_s)
        return None
    with pytest.raises(TimeoutError) as caught:
        zcomm.all_reduce(torch.ones(1000))
    time.sleep(2.5 * timeout_s)  # until rank 1 has ended, because leaving earlier would cause another error
    return str(caught.value)


def test_deadline_names_the_late_rank(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, message in enumerate(run_ranks(late_rank, 3, 1.5)):
        if rank != 1:
            assert re.search(r"rank 1\b|rank\(s\) 1\b|ranks 1\b|\[1\]", message), message
            assert "1.5" in message and "all_reduce" in message, message


def peer_never_comes() -> str:
    with pytest.raises((TimeoutError, ConnectionError)) as caught:
        zcomm.init(timeout=1.5, rank=0, world_size=2)
    assert not zcomm.is_initialized()
    return str(caught.value)


def test_init_ends_when_a_rank_never_comes(run_ranks: Callable[..., list[Any]]) -> None:
    (message,) = run_ranks(peer_never_comes, 1)
    assert re.search(r"\b1\b", message), message


def wait_for_a_sleeper(folder: str) -> float | None:
    """Rank 0 waits in a barrier that rank 1 never enters; return the time of its KeyboardInterrupt."""
    comm = zcomm.init(timeout=60)
    if comm.rank == 1:
        deadline = time.monotonic() + 30
        while not Path(folder, "done").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    Path(folder, "waits").touch()
    try:
        comm.barrier()
    except KeyboardInterrupt:
        return time.monotonic()
    finally:
        Path(folder, "done").touch()
    return None


def test_ctrl_c_reaches_a_rank_that_waits(start_ranks_in: Callable[..., Any], tmp_path: Path) -> None:
    world = start_ranks_in(wait_for_a_sleeper, 2, str(tmp_path))
    deadline = time.monotonic() + 30
    while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # it waits in the barrier by now
    sent = world.kill(0, signal.SIGINT)
    results = world.join(60)
    assert results[0].value is not None, results[0].describe()
    assert results[0].value - sent < 15.0, "a quarter of the deadline"
