"""Parts of a communicator: membership, values, threads, resources that close() releases, and failures."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from late import init_with_deadline, tell, wait_until_told
from tasks import tasks
from tiers import slow

Run = Callable[..., list[Any]]

TWO_HOSTS = "two hosts"


def init(backend: str = "auto", timeout: float = 30.0) -> zcomm.Communicator:
    """Join a job; "two hosts" puts ranks [0, n/2) on one simulated host and the others on another."""
    if backend == TWO_HOSTS:
        os.environ["ZCOMM_HOST_ID"] = f"host{2 * int(os.environ['RANK']) // int(os.environ['WORLD_SIZE'])}"
        backend = "auto"
    return zcomm.init(backend, timeout)


def total(comm: zcomm.Communicator, value: float) -> float:
    tensor = torch.full((5,), value)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [tensor[0].item()] * 5
    return float(tensor[0])


# ---- membership ----
def parts_by_color_and_key(backend: str) -> None:
    comm = init(backend)
    rank, world = comm.rank, comm.world_size
    half = comm.split(rank % 2, key=-rank)
    assert half is not None
    members = sorted((r for r in range(world) if r % 2 == rank % 2), reverse=True)
    assert (half.world_size, half.rank) == (len(members), members.index(rank))
    assert half.all_gather(torch.tensor([rank])).tolist() == members
    assert total(half, rank) == sum(members)

    same = comm.split(7)
    assert same is not None and (same.rank, same.world_size) == (rank, world), "equal keys: by rank"
    none_left = comm.split(None if rank == 0 else -1)
    assert none_left is None
    some = comm.split(0 if rank == world - 1 else None)
    assert (some is None) == (rank != world - 1)
    if some is not None:
        assert total(some, 3) == 3

    part = half.split(half.rank)  # a part of a part, of one rank
    assert part is not None and part.world_size == 1 and total(part, rank) == rank
    tensor = half.empty(1000)
    tensor.fill_(rank)
    half.all_reduce(tensor)
    assert tensor.tolist() == [sum(members)] * 1000
    assert total(comm, 1) == world, "the parent goes on"
    comm.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parts_by_color_and_key(world_size: int, run_ranks: Run) -> None:
    run_ranks(parts_by_color_and_key, world_size, "auto")


@pytest.mark.parametrize("backend", ["tcp", TWO_HOSTS])
def test_parts_between_hosts(backend: str, run_ranks: Run) -> None:
    run_ranks(parts_by_color_and_key, 4, backend)


def parts_have_their_places(_: None = None) -> list[tuple[str, int, int]]:
    comm = init(TWO_HOSTS)
    across, inside, uneven = (
        comm.split(comm.rank % 2, name="across"),
        comm.split(comm.rank // 2, name="inside"),
        comm.split(0 if comm.rank < 3 else None, name="uneven"),
    )
    found = []
    for part in (comm, across, inside, uneven):
        found.append((part.backend, part.local_rank, part.local_world_size) if part else ("", 0, 0))
        if part is not None:
            assert total(part, 1) == part.world_size
    comm.barrier()
    return found


def test_parts_have_the_backend_of_their_place(run_ranks: Run) -> None:
    for rank, found in enumerate(run_ranks(parts_have_their_places, 4)):
        uneven = [("tcp", 0, 2), ("tcp", 1, 2), ("tcp", 0, 1), ("", 0, 0)][rank]
        assert found == [("hierarchical", rank % 2, 2), ("tcp", 0, 1), ("shm", rank % 2, 2), uneven]


def bad_colors() -> None:
    comm = init()
    for color, key in (("red", 0), (1.5, 0), (2**63, 0), (0, 2**63), (0, "a")):
        with pytest.raises(ValueError, match="64-bit"):
            comm.split(color, key)  # type: ignore[arg-type]
    assert total(comm, 1) == comm.world_size, "nothing was done"


def test_bad_colors_are_refused_before_anything_happens(run_ranks: Run) -> None:
    run_ranks(bad_colors, 2)


# ---- many, and from several threads ----
def many_at_once() -> None:
    comm = init()
    parts = [comm.split(number % 2 if comm.rank else 0, name=f"part {number}") for number in range(20)]
    works = []
    tensors = []
    for number, part in enumerate(parts):
        assert part is not None
        tensors.append(torch.full((1000,), float(number)))
        works.append(part.all_reduce(tensors[-1], async_op=True))
    for number in reversed(range(20)):
        works[number].wait()
        assert tensors[number][0] == number * parts[number].world_size
    for part in parts:
        part.close()
    with pytest.raises(RuntimeError, match="closed"):
        parts[0].barrier()
    assert total(comm, 2) == 2 * comm.world_size


def test_twenty_parts_work_at_once(run_ranks: Run) -> None:
    run_ranks(many_at_once, 3)


def threads_with_a_communicator_each() -> list[str]:
    """Each thread splits and uses its own communicator, so threads need no common order."""
    comm = init()
    own = [comm.duplicate() for _ in range(4)]
    errors: list[str] = []

    def work(index: int) -> None:
        try:
            for turn in range(5):
                part = own[index].split((comm.rank + turn) % 2)
                assert part is not None
                for _ in range(20):
                    assert total(part, index) == index * part.world_size
                assert total(own[index], 1) == comm.world_size
                part.close()
        except BaseException as error:
            errors.append(repr(error))
            raise

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    comm.barrier()
    return errors


def test_threads_split_their_own_communicators(run_ranks: Run) -> None:
    assert run_ranks(threads_with_a_communicator_each, 3) == [[]] * 3


def split_in_another_order() -> str:
    comm = init()
    names = ["first", "second"] if comm.rank == 0 else ["second", "first"]
    with pytest.raises(zcomm.CollectiveMismatch) as caught:
        for name in names:
            comm.split(0, name=name)
    return str(caught.value)


def test_names_tell_splits_apart(run_ranks: Run) -> None:
    for message in run_ranks(split_in_another_order, 2):
        assert "split 'first'" in message and "split 'second'" in message, message


# ---- resources that close() releases ----
def footprint(before: dict[str, int] | None = None) -> dict[str, int]:
    gc.collect()
    with open("/proc/self/maps") as maps:
        memfd = maps.read().count("memfd:")
    return {"fd": len(os.listdir("/proc/self/fd")), "tasks": tasks(before and before["tasks"]), "memfd": memfd}


def no_more(after: dict[str, int], before: dict[str, int]) -> bool:
    return all(after[key] == before[key] or (key == "tasks" and after[key] < before[key]) for key in before)


def split_and_close(backend: str, rounds: int) -> list[dict[str, int]]:
    comm = init(backend)
    seen = []
    for number in range(rounds):
        part = comm.split(number % 2)
        assert part is not None
        assert total(part, 1) == comm.world_size
        twin = part.duplicate()
        assert total(twin, 2) == 2 * comm.world_size
        twin.close()
        part.close()
        comm.barrier()
        if number in (0, rounds - 1):
            seen.append(footprint(seen[0] if seen else None))
    return seen


@pytest.mark.parametrize(("backend", "world_size"), [slow("auto", 3), ("tcp", 2), slow(TWO_HOSTS, 4)])
def test_split_and_close_grows_nothing(backend: str, world_size: int, run_ranks: Run) -> None:
    for first, last in run_ranks(split_and_close, world_size, backend, 20):
        assert no_more(last, first), (first, last)


def parts_end_with_shutdown() -> tuple[dict[str, int], dict[str, int]]:
    init()
    zcomm.shutdown()
    before = footprint()
    comm = zcomm.init(init_method=os.environ["ZCOMM_INIT_METHOD"] + "2")
    part = comm.split(0)
    assert part is not None and total(part, 1) == comm.world_size
    zcomm.shutdown()
    with pytest.raises(RuntimeError, match="closed"):
        part.barrier()
    del comm, part
    return before, footprint(before)


def test_shutdown_closes_parts(run_ranks: Run) -> None:
    for before, after in run_ranks(parts_end_with_shutdown, 2):
        assert no_more(after, before), (before, after)


def part_outlives_parent() -> None:
    comm = init()
    whole = comm.duplicate()
    part = whole.split(0)
    assert part is not None
    whole.close()
    assert total(part, 1) == comm.world_size


def test_a_part_outlives_its_parent(run_ranks: Run) -> None:
    run_ranks(part_outlives_parent, 2)


# ---- failures ----
def no_descriptors_left() -> str:
    """Rank 1 has no descriptor for a part: both ranks raise, and the parent stays usable."""
    comm = init()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if comm.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, hard))
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            comm.split(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if comm.rank == 1:
        assert isinstance(caught.value, OSError) and caught.value.errno == errno.EMFILE
    part = comm.split(0)
    assert part is not None and total(part, 1) == comm.world_size
    return str(caught.value)


def test_a_rank_without_descriptors_fails_its_part_only(run_ranks: Run) -> None:
    for message in run_ranks(no_descriptors_left, 2):
        assert "rank 1" in message and "ulimit -n" in message, message


def loss_in_a_part(backend: str) -> tuple[tuple[int, int], str, float]:
    """Kill the parent's rank 2, rank 1 of a part of ranks 0 and 2, during a collective of the part."""
    comm = init(backend)
    part = comm.split(0 if comm.rank != 1 else None)
    if comm.rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(zcomm.PeerLost) as caught:
        if part is not None:
            part.barrier()
        else:
            comm.barrier()
    took_s = time.monotonic() - started
    time.sleep(1.0)  # a rank that leaves at once could be noticed first
    return (caught.value.rank, caught.value.group_rank), str(caught.value), took_s


@pytest.mark.parametrize("backend", ["auto", "tcp"])
def test_loss_in_a_part_has_both_ranks(backend: str, run_ranks: Run) -> None:
    results = run_ranks(loss_in_a_part, 3, backend, check=False)
    assert results[2].exitcode == -signal.SIGKILL
    for rank, named in ((0, 1), (1, 2)):
        assert results[rank].error is None, results[rank].describe()
        lost, message, took_s = results[rank].value
        assert lost == (2, named) and f"rank {named}" in message
        assert took_s < 15, "half of the deadline"


def message_in_a_part(pending: bool) -> tuple[int, int, str] | None:
    """Kill the job's rank 2, rank 0 of a part of ranks 2 and 0, while rank 0 waits for its message in a duplicate."""
    comm = init("auto")
    part = comm.split(0 if comm.rank != 1 else None, -comm.rank)
    if part is None:
        return None
    part = part.duplicate()
    if comm.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(zcomm.PeerLost) as caught:
        if pending:
            work = part.recv(torch.empty(3), 0, async_op=True)
            work.wait()
        else:
            part.recv(torch.empty(3), 0)
    return caught.value.rank, caught.value.group_rank, str(caught.value)


@pytest.mark.parametrize("pending", [True, False])
def test_a_message_in_a_part_has_both_ranks(pending: bool, run_ranks: Run) -> None:
    results = run_ranks(message_in_a_part, 3, pending, check=False)
    lost, of_part, message = results[0].value
    assert (
        (lost, of_part) == (2, 0) and "rank 0 died" in message and "its ranks 0, 1 are ranks 2, 0 of the job" in message
    )


def late_for_a_split(folder: str) -> str | None:
    comm = init_with_deadline(1.0)
    if comm.rank == 1:
        wait_until_told(folder, "late", [0])
        return None
    with pytest.raises(TimeoutError) as caught:
        comm.split(0, name="halves")
    tell(folder, "late")
    return str(caught.value)


def test_a_rank_late_for_a_split_is_named(run_ranks: Run, tmp_path: Path) -> None:
    message, _ = run_ranks(late_for_a_split, 2, str(tmp_path))
    assert "rank 1" in message and "split 'halves'" in message and "test_split.py:" in message, message
