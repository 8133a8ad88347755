"""send and recv from Python: values, order by tag, any source, both sides of a failure, a rank that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]
COUNTS = [0, 1, 7, 1025, 300_007]  # the last is sent in several pieces
LARGE = 300_000


def make(count: int, dtype: torch.dtype, rank: int) -> torch.Tensor:
    values = torch.arange(count) % 7 + rank
    return values % 2 == 0 if dtype == torch.bool else values.to(dtype)


# ---- values ----
def around_the_ring() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    following, previous = (rank + 1) % world, (rank - 1) % world
    for dtype in DTYPES:
        for count in COUNTS:
            sent = zcomm.send(make(count, dtype, rank), following, tag=count, async_op=True)
            got = torch.empty(count, dtype=dtype)
            assert zcomm.recv(got, previous, tag=count) == previous
            assert sent is not None
            sent.wait()
            assert torch.equal(got, make(count, dtype, previous)), f"{dtype} {count}"


def lists_are_cut_differently() -> None:
    if zcomm.rank() == 0:
        assert zcomm.send([torch.arange(10), torch.empty(0, dtype=torch.int64), torch.arange(10, 14)], 1) is None
    elif zcomm.rank() == 1:
        parts = [torch.zeros(3, dtype=torch.int64), torch.zeros(11, dtype=torch.int64)]
        zcomm.recv(parts, 0)
        assert torch.cat(parts).tolist() == list(range(14))


def tags_choose() -> None:
    """Receive on rank 1 in the opposite order: a message without a receive delays no other tag."""
    if zcomm.rank() == 0:
        works = [zcomm.send(torch.full((LARGE,), float(tag)), 1, tag=tag, async_op=True) for tag in range(4)]
        for work in works:
            assert work is not None
            work.wait()
    elif zcomm.rank() == 1:
        for tag in reversed(range(4)):
            got = torch.empty(LARGE)
            zcomm.recv(got, 0, tag=tag)
            assert bool((got == tag).all())


def from_anyone() -> None:
    if zcomm.rank() != 0:
        zcomm.send(torch.tensor([zcomm.rank()]), 0, tag=11)
        return
    seen = []
    for i in range(1, zcomm.world_size()):
        got = torch.zeros(1, dtype=torch.int64)
        if i % 2 == 0:
            source = zcomm.recv(got, tag=11)
        else:
            work = zcomm.recv(got, tag=11, async_op=True)
            work.wait()
            source = work.source
        assert got.item() == source
        seen.append(source)
    assert sorted(seen) == list(range(1, zcomm.world_size()))


def everyone_to_everyone() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    peers = [peer for peer in range(world) if peer != rank]
    out = [torch.full((LARGE,), float(10 * rank + peer)) for peer in peers]
    got = [torch.empty(LARGE) for _ in peers]
    works = [zcomm.recv(tensor, peer, async_op=True) for peer, tensor in zip(peers, got, strict=True)]
    sends = [zcomm.send(tensor, peer, async_op=True) for peer, tensor in zip(peers, out, strict=True)]
    total = torch.ones(1000)
    zcomm.all_reduce(total)  # pending messages do not affect it
    assert bool((total == world).all())
    for peer, tensor, work in zip(peers, got, works, strict=True):
        work.wait()
        assert work.source == peer and bool((tensor == 10 * peer + rank).all())
    for sent in sends:
        assert sent is not None
        sent.wait()


def bad_arguments() -> None:
    tensor = torch.ones(3)
    world, rank = zcomm.world_size(), zcomm.rank()
    with pytest.raises(ValueError, match=f"dst={world}"):
        zcomm.send(tensor, world)
    with pytest.raises(ValueError, match="another rank"):
        zcomm.send(tensor, rank)
    with pytest.raises(ValueError, match=f"src={world}"):
        zcomm.recv(tensor, world)
    with pytest.raises(ValueError, match="tag=-1"):
        zcomm.send(tensor, (rank + 1) % world, tag=-1)


VALUES: list[Callable[[], None]] = [
    around_the_ring,
    lists_are_cut_differently,
    tags_choose,
    from_anyone,
    everyone_to_everyone,
    bad_arguments,
]


def run_values() -> None:
    zcomm.init()
    for check in VALUES:
        check()
        zcomm.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_values(world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(run_values, world_size)


# ---- failures ----
def mismatch() -> str:
    comm = zcomm.init()
    with pytest.raises(zcomm.CollectiveMismatch) as caught:
        if comm.rank == 0:
            comm.send(torch.ones(LARGE), 1, tag=3, name="x")
        else:
            comm.recv(torch.ones(LARGE + 1), 0, tag=3, name="x")
    comm.barrier()  # all other operations have succeeded
    return str(caught.value)


def test_both_sides_are_told_of_a_mismatch(run_ranks: Callable[..., list[Any]]) -> None:
    first, second = run_ranks(mismatch, 2)
    assert first == second
    assert f"rank 0: send float32 count={LARGE} tag=3 to rank 1 'x' at test_messages.py:" in first
    assert f"rank 1: recv float32 count={LARGE + 1} tag=3 from rank 0 'x' at test_messages.py:" in first


def both_send_first() -> str:
    comm = zcomm.init(timeout=1.0)
    with pytest.raises(TimeoutError) as caught:
        comm.send(torch.ones(LARGE), 1 - comm.rank)
    comm.barrier()
    return str(caught.value)


def test_blocking_sends_to_each_other_end_at_the_deadline(run_ranks: Callable[..., list[Any]]) -> None:
    for rank, message in enumerate(run_ranks(both_send_first, 2)):
        assert f"rank {rank} waited 1 s for rank {1 - rank} to ask for it" in message
        assert f"rank {1 - rank} has sent " in message and "send float32" in message
        assert message.count("test_messages.py:") == 2  # the call site of each side


def killed_in_the_middle() -> None:
    comm = zcomm.init()
    if comm.rank == 2:  # continues with rank 0 despite rank 1's death
        for value in range(50):
            comm.send(torch.full((1000,), float(value)), 0, tag=2)
    elif comm.rank == 1:
        work = comm.send(torch.ones(50 * LARGE), 0, tag=1, async_op=True)
        comm.recv(torch.zeros(1), 0)  # rank 0 has received a part
        os.kill(os.getpid(), signal.SIGKILL)
        del work
    else:
        work_of_1 = comm.recv(torch.zeros(50 * LARGE), 1, tag=1, async_op=True)
        comm.send(torch.zeros(1), 1)
        for value in range(50):
            got = torch.zeros(1000)
            comm.recv(got, 2, tag=2)
            assert bool((got == value).all())
        with pytest.raises(zcomm.PeerLost, match="rank 1 died") as caught:
            # It may be complete before the kill, but the next message is never sent.
            work_of_1.wait()
            comm.recv(torch.zeros(1), 1, tag=1)
        assert caught.value.rank == 1


def test_killed_in_the_middle_of_a_message(run_ranks: Callable[..., list[Any]]) -> None:
    results = run_ranks(killed_in_the_middle, 3, check=False)
    assert [result.exitcode for result in results] == [0, -9, 0], "\n".join(r.describe() for r in results)
    assert results[0].error is None and results[2].error is None, "\n".join(r.describe() for r in results)
