"""Late ranks: awaited while they are alive, reported once with their call, and named once they are not."""

from __future__ import annotations

import datetime
import logging
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from late import tell, wait_until_told
from ranks import World
from zcomm.bootstrap import deadlines
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.machine.process import stat_of

Run = Callable[..., list[Any]]
WARN_S = 0.2
DEADLINE_S = 0.5
SLOW_S = 1.2  # more than two deadlines
LIMIT_S = 1.2


def join_by_default(backend: str, limit_s: float) -> tuple[zcomm.Communicator, list[str]]:
    """Join under short defaults, with two simulated hosts for "hierarchical"; also return the log."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ["ZCOMM_HOST_ID"] = f"host {rank * 2 // world_size}" if backend == "hierarchical" else "host"
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    # Joining may be slow on a busy machine: only operations have the short times.
    deadlines.WARN_S = WARN_S
    times = {"timeout_s": DEADLINE_S, "limit_s": limit_s, "warn_s": WARN_S}
    Deadlines.as_arguments = lambda self: times  # type: ignore[method-assign]
    comm = zcomm.init(backend)
    comm.barrier()
    del told[:]
    return comm, told


def wait_for_a_late_rank(backend: str, kind: str, folder: str) -> tuple[list[str], list[float]]:
    comm, told = join_by_default(backend, 60.0)
    warned = Path(folder, "warned")
    handler = logging.Handler()
    handler.emit = lambda record: warned.touch()  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    value = torch.full((1000,), float(comm.rank + 1))
    last = comm.world_size - 1
    if comm.rank == last:
        while not warned.exists():  # on a busy machine other ranks may be late
            time.sleep(0.02)
        time.sleep(SLOW_S - WARN_S)
    if kind == "all_reduce":
        comm.all_reduce(value, name="loss")
    elif kind == "async":
        work = comm.all_reduce(value, async_op=True, name="loss")
        assert work is not None
        work.wait()
    elif comm.rank == last:
        comm.send(value, 0)
    elif comm.rank == 0:
        comm.recv(value, last)
    comm.barrier()
    return told, value[:1].tolist()


@pytest.mark.parametrize(
    ("backend", "kind", "world_size"),
    [
        ("shm", "all_reduce", 3),
        pytest.param("shm", "async", 2, marks=pytest.mark.slow),
        ("shm", "message", 2),
        ("tcp", "all_reduce", 3),
        ("tcp", "message", 2),
        pytest.param("hierarchical", "all_reduce", 4, marks=pytest.mark.slow),
    ],
)
def test_a_late_rank_is_waited_for_and_reported_once(
    backend: str, kind: str, world_size: int, run_ranks: Run, tmp_path: Path
) -> None:
    results = run_ranks(wait_for_a_late_rank, world_size, backend, kind, str(tmp_path))
    late = world_size - 1
    told = [line for lines, _ in results for line in lines]
    assert len(told) in ((2, 4) if backend == "hierarchical" else (2,)), told
    local = 1 if backend == "hierarchical" else late
    warning = next(line for line in told if "has waited" in line and f"rank {local}" in line)
    if kind != "message":
        assert "'loss' at test_late_ranks.py:" in warning, warning
        assert f"rank {local} (" in warning and "last entered operation" in warning, warning
        assert "barrier" in warning or backend == "hierarchical", warning
    assert any(f"rank {local} came after" in line for line in told) or kind == "message", told
    for rank, (_, value) in enumerate(results):
        if kind != "message":
            assert value == [world_size * (world_size + 1) / 2]
        elif rank == 0:
            assert value == [float(world_size)]


def wait_for_a_stopped_rank(backend: str, file: str) -> tuple[list[str], str]:
    comm, told = join_by_default(backend, 60.0)
    if comm.rank == 1:
        Path(file).write_text(f"{os.getpid()} ")
        signal.raise_signal(signal.SIGSTOP)
        return told, ""
    while not (Path(file).exists() and (pid := Path(file).read_text()).endswith(" ") and stat_of(int(pid))[0] == "T"):
        time.sleep(0.01)
    with pytest.raises(TimeoutError) as caught:
        comm.all_reduce(torch.ones(10), name="loss")
    return told, str(caught.value)


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_and_shows_no_life(
    backend: str, start_ranks_in: Callable[..., World], tmp_path: Path
) -> None:
    world = start_ranks_in(wait_for_a_stopped_rank, 2, backend, str(tmp_path / "here"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and world.processes[0].is_alive():
        time.sleep(0.05)
    world.kill(1, signal.SIGCONT)
    results = world.join()
    assert results[0].error is None, results[0].describe()
    told, message = results[0].value
    word = "is stopped (SIGSTOP, or a debugger)" if backend == "shm" else "does not answer (is its process stopped?)"
    assert word in told[0] and "rank 1" in told[0] and "'loss'" in told[0], told
    assert word in message, message


def never_come(backend: str, folder: str) -> float:
    return waited_for_rank_1(join_by_default(backend, LIMIT_S)[0], folder)


def waited_for_rank_1(comm: zcomm.Communicator, folder: str) -> float:
    """Let rank 0 wait for rank 1, which ends only afterwards, because leaving earlier would cause another error."""
    ended = Path(folder, "ended")
    if comm.rank == 1:
        while not ended.exists():
            time.sleep(0.02)
        return 0.0
    with pytest.raises(TimeoutError) as caught:
        comm.all_reduce(torch.ones(10))
    ended.touch()
    found = re.search(r"rank 0 waited ([0-9.]+) s for rank 1\b", str(caught.value))
    assert found is not None, str(caught.value)
    return float(found[1])


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_rank_that_lives_and_never_comes_ends_at_the_limit(backend: str, run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(never_come, 2, backend, str(tmp_path))[0] >= LIMIT_S


def exact(backend: str, timeout: float | None, folder: str) -> float:
    deadlines.WARN_S = 0.2
    comm = zcomm.init(backend, timeout)
    comm.barrier()
    return waited_for_rank_1(comm, folder)


@pytest.mark.slow
def test_a_time_that_is_named_is_exact(run_ranks: Run, tmp_path: Path) -> None:
    named, by_environment = tmp_path / "named", tmp_path / "by_environment"
    named.mkdir()
    by_environment.mkdir()
    waits = [run_ranks(exact, 2, "shm", 0.9, str(named))[0]]
    waits += run_ranks(exact, 2, "tcp", None, str(by_environment), env={"DEEPSPEED_TIMEOUT": "0.015"})[:1]
    assert all(0.9 <= waited < 20 for waited in waits), "a rank that lives is given 30 minutes if no time is named"


def test_which_time_counts() -> None:
    assert Deadlines.of(None, {}) == Deadlines(600.0, 1800.0, 60.0)
    assert Deadlines.of(None, {"DEEPSPEED_TIMEOUT": "45"}) == Deadlines(2700.0, 2700.0, 60.0)
    assert Deadlines.of(5, {"DEEPSPEED_TIMEOUT": "45"}) == Deadlines(5.0, 5.0, 60.0)
    assert Deadlines.of(datetime.timedelta(minutes=2), {}) == Deadlines(120.0, 120.0, 60.0)
    for text in ("soon", "", "0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match="environment variable DEEPSPEED_TIMEOUT="):
            Deadlines.of(None, {"DEEPSPEED_TIMEOUT": text})
    with pytest.raises(ValueError, match="timeout='5'"):
        Deadlines.of("5", {})


def join_late(folder: str) -> list[str]:
    told: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        told.append(record.getMessage())
        tell(folder, "warned")

    handler = logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    deadlines.WARN_S = 0.3
    if int(os.environ["RANK"]) == 1:
        wait_until_told(folder, "warned", [0])
    zcomm.init().barrier()
    return told


def test_a_rank_that_joins_late_is_reported_once(run_ranks: Run, tmp_path: Path) -> None:
    first, second, third = run_ranks(join_late, 3, str(tmp_path))
    assert len(first) == 2 and second == third == [], (first, second, third)
    late = r"init: rank\(s\) 1(, 2)? of 3 did not come to .* after [0-9.]+ s"  # rank 2 may be late on a busy machine
    assert re.match(late, first[0]), first
    assert first[1].startswith("init: all ranks have come after ")


def lose_a_rank(backend: str) -> float:
    """Return the time from the death of rank 1 until other ranks raise, under the default times."""
    os.environ["ZCOMM_HOST_ID"] = f"host {int(os.environ['RANK']) // 2}"
    comm = zcomm.init(backend)
    stamp = torch.zeros(1, dtype=torch.float64)
    if comm.rank == 1:
        stamp[0] = time.monotonic() + 0.5
    comm.broadcast(stamp, 1)
    if comm.rank == 1:
        time.sleep(max(0.0, stamp.item() - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zcomm.PeerLost, match="rank 1 died"):
        comm.all_reduce(torch.ones(1000))
    return time.monotonic() - stamp.item()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tcp", "hierarchical"])
def test_a_killed_rank_is_named_long_before_the_default_deadline(backend: str, run_ranks: Run) -> None:
    results = run_ranks(lose_a_rank, 4, backend, check=False)
    for rank in (0, 2, 3):
        assert results[rank].error is None, results[rank].describe()
        assert results[rank].value < deadlines.DEFAULT_S / 10
