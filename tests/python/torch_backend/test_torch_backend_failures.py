"""Failures over "zcomm" raise an error on every rank, and no rank waits forever."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from torch_world import world


def _dies() -> float:
    """Rank 1 dies while the others are in an all_reduce."""
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
    """DDP waits only for Futures, so the error comes through them, as a RuntimeError with the core's text."""
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
    """Set a shorter timeout for one call."""
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
    """Let wait(timeout) time out, which does not affect the operation."""
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


_Op = dist.ReduceOp


def _of(dtype: torch.dtype, count: int = 4) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype)


def _reduce(dtype: torch.dtype, op: Any, count: int = 4) -> Callable[[Any], Any]:
    return lambda group: dist.all_reduce(_of(dtype, count), op, group)


def _list(*dtypes: torch.dtype, count: int = 4) -> Callable[[Any], Any]:
    return lambda group: group.allreduce_coalesced([_of(dtype, count) for dtype in dtypes]).wait()


def _moved(name: str, dtype: torch.dtype, count: int) -> Any:
    one, lists = _of(dtype, count), [_of(dtype, count), _of(dtype, count)]
    calls: dict[str, Callable[[Any], Any]] = {
        "broadcast": lambda group: dist.broadcast(one, 0, group),
        "all_gather": lambda group: dist.all_gather(lists, one, group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(_of(dtype, 2 * count), one, group),
        "gather": lambda group: dist.gather(one, lists if dist.get_rank() == 0 else None, 0, group),
        "scatter": lambda group: dist.scatter(one, lists if dist.get_rank() == 0 else None, 0, group),
        "all_to_all": lambda group: dist.all_to_all(lists, [one, one], group),
        "all_to_all_single": lambda group: dist.all_to_all_single(
            _of(dtype, 2 * count), _of(dtype, 2 * count), group=group
        ),
        "uneven all_gather": lambda group: dist.all_gather(
            [_of(dtype, (rank + 1) * count) for rank in range(2)], _of(dtype, (dist.get_rank() + 1) * count), group
        ),
    }
    return calls[name]


def _scattered(dtype: torch.dtype, op: Any, count: int = 4) -> Callable[[Any], Any]:
    return lambda group: dist.reduce_scatter_tensor(_of(dtype, count), _of(dtype, 2 * count), op, group)


def _sparse(dtype: torch.dtype) -> Callable[[Any], Any]:
    return lambda group: dist.all_reduce(_of(dtype).to_sparse(), group=group)


_PAIRS: list[tuple[Any, Any]] = [  # calls of the two ranks; the core's dtypes, reductions and byte counts are equal
    (_reduce(torch.int32, _Op.BXOR), _reduce(torch.int32, _Op.BOR)),
    (_reduce(torch.int16, _Op.SUM), _reduce(torch.uint16, _Op.SUM)),
    (_reduce(torch.int16, _Op.SUM), _reduce(torch.int16, _Op.MAX)),
    (_list(torch.complex64), _list(torch.float32, count=8)),  # torch.distributed.all_reduce itself passes pairs
    (_reduce(torch.bool, _Op.BOR), _reduce(torch.bool, _Op.MAX)),
    (_reduce(torch.int16, _Op.SUM), _moved("all_gather", torch.uint8, 8)),
    (_reduce(torch.float32, dist._make_nccl_premul_sum(2.0)), _reduce(torch.float32, _Op.SUM)),
    (_list(torch.float32, torch.float64, torch.float32), _list(torch.float32, torch.float32, torch.float64)),
    (
        _sparse(torch.float32),
        lambda group: dist.all_gather_into_tensor(_of(torch.int64, 8), _of(torch.int64, 4), group),
    ),
    (_sparse(torch.float32), _sparse(torch.int32)),
    (_scattered(torch.int32, _Op.BAND), _scattered(torch.int32, _Op.BOR)),
    (_scattered(torch.int16, _Op.SUM), _scattered(torch.float8_e5m2, _Op.SUM, 8)),
    (_scattered(torch.int16, _Op.SUM), _moved("all_to_all_single", torch.int16, 4)),
    (lambda group: dist.reduce(_of(torch.int16), 0, _Op.SUM, group), _moved("gather", torch.int16, 4)),
    (_moved("uneven all_gather", torch.float32, 4), _moved("uneven all_gather", torch.int32, 4)),
    *(
        (_moved(name, torch.int16, 4), _moved(name, dtype, count))
        for name, dtype, count in (
            ("broadcast", torch.float8_e5m2, 8),
            ("all_gather", torch.uint16, 4),
            ("all_gather_into_tensor", torch.uint8, 8),
            ("gather", torch.uint16, 4),
            ("scatter", torch.uint16, 4),
            ("all_to_all", torch.uint16, 4),
            ("all_to_all_single", torch.float8_e4m3fn, 8),
            ("uneven all_gather", torch.uint16, 4),
        )
    ),
]


def _unlike() -> list[str]:
    wrong = []
    with world() as (rank, _size):
        for number, calls in enumerate(_PAIRS):
            group = dist.new_group()
            try:
                calls[rank](group)
                wrong.append(f"pair {number}: no error")
            except RuntimeError as error:
                if type(error).__name__ != "CollectiveMismatch":
                    wrong.append(f"pair {number}: {error!r}")
        for kinds in ((torch.int16, torch.uint16), (torch.float8_e5m2, torch.uint8)):
            for count in (4, 100_000):
                tensor = _of(kinds[rank], count)
                with pytest.raises(RuntimeError, match=r"\(\w+\) count=\d+ tag=0") as caught:
                    if rank == 0:
                        dist.send(tensor, 1)
                        dist.recv(tensor, 1)  # a small message has already been sent
                    else:
                        dist.recv(tensor, 0)
                assert type(caught.value).__name__ == "CollectiveMismatch"
        for call in (
            lambda: dist.reduce_scatter(_of(torch.float32, rank + 1), [_of(torch.float64, 1), _of(torch.float64, 2)]),
            lambda: dist.all_gather([_of(torch.float64, 1), _of(torch.float64, 2)], _of(torch.float32, rank + 1)),
        ):
            with pytest.raises((ValueError, RuntimeError), match=r"(?i)float64|type"):
                call()
    return wrong


def test_calls_that_move_the_same_bytes_are_told_apart(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(_unlike, 2) == [[], []]


def _called_by_a_thread() -> None:
    """Rank 0 waits in one group, while a thread is about to make the first call on another."""
    with world():
        group = dist.new_group()
        if dist.get_rank() == 0:

            def late() -> None:
                time.sleep(3.0)  # longer than detection of a standstill takes
                dist.barrier(group)

            thread = threading.Thread(target=late)
            thread.start()
            dist.barrier()
            thread.join()
        else:
            dist.barrier(group)
            dist.barrier()


def test_a_thread_that_comes_late_is_waited_for(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_called_by_a_thread, 2)


def _monitored() -> str:
    with world() as (rank, size):
        short = timedelta(seconds=0.5)
        text = ""
        if rank in (0, 3):
            with pytest.raises(TimeoutError) as caught:
                dist.monitored_barrier(timeout=short if rank == 0 else timedelta(seconds=30), wait_all_ranks=True)
            text = str(caught.value)
        dist.barrier()
        dist.monitored_barrier()  # the group is still usable
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size
        return text


def test_monitored_barrier_names_the_missing(run_ranks: Callable[..., list[Any]]) -> None:
    texts = run_ranks(_monitored, 4)
    assert "Ranks 1, 2 failed" in texts[0], texts
    assert "rank 0" in texts[3] and "Ranks 1, 2 failed" in texts[3], texts


def _makes_a_group_alone() -> tuple[str, float]:
    """Rank 2 dies while rank 0 waits for rank 2, and rank 1 has finished its part of a group without rank 2."""
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
    """Rank 1 joins after rank 0's handler has raised."""

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


def _raises_and_ends_late(rank: int, folder: str) -> None:
    atexit.register(time.sleep, 0.5 if rank == 1 else 0.0)  # runs last: after the goodbye to the other rank
    import zcomm.torch_backend  # noqa: F401

    dist.init_process_group("zcomm", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        raise ValueError("the program's own")
    dist.barrier()


@pytest.mark.slow
def test_the_first_failure_is_seen_first(tmp_path: Path) -> None:
    """The rank that loses its peer ends after the raising rank, so spawn() shows the cause."""
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="ValueError: the program's own"):
        torch.multiprocessing.spawn(_raises_and_ends_late, (str(tmp_path),), 2)
