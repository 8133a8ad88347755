"""One suite for every backend: each check takes a communicator of any kind and proves what it does.

Oracles: exact results of small integers; on backends that sum in rank order, the bits of that sum; elsewhere equal bits
on all ranks and closeness to float64. As a script it is a rank of an mpirun: `backend_suite.py FOLDER JOB`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

import zcomm

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
COUNTS = [0, 1, 65, 1001, 70_003]
RANK_ORDER = ("shm", "mpi")  # backends whose sums have the bits of the bitwise contract


def numbers(count: int, dtype: torch.dtype, rank: int, seed: int = 0) -> torch.Tensor:
    """Rank's input: small integers, so that every order of summation gives the same bits."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 3, (count,), generator=generator)
    return values > 0 if dtype == torch.bool else values.to(dtype)


def expected(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = inputs[0].dtype
    stack = torch.stack([tensor.to(torch.float64 if dtype.is_floating_point else torch.int64) for tensor in inputs])
    if op in ("sum", "avg"):
        total = stack.sum(0)
        return (total / len(inputs) if op == "avg" else total).to(dtype)
    if op == "prod":
        return stack.prod(0).to(dtype)
    return (stack.amin(0) if op == "min" else stack.amax(0)).to(dtype)


def equal(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {tuple(got.shape)}"
    if not torch.equal(got, want):
        place = int((got != want).nonzero()[0])
        raise AssertionError(f"{what}: element {place} is {got[place]}, expected {want[place]}")


def raises(kind: type[Exception], pattern: str, call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        assert re.search(pattern, str(error)), f"{type(error).__name__}: {error!s} does not match {pattern!r}"
        return str(error)
    raise AssertionError(f"no {kind.__name__} that matches {pattern!r}")


def ops_of(dtype: torch.dtype) -> list[str]:
    return ["sum", "min", "max", "prod", *(["avg"] if dtype.is_floating_point else [])]


# ---- reductions ----
def all_reduce(comm: zcomm.Communicator) -> None:
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        for count in COUNTS:
            inputs = [numbers(count, dtype, r) for r in range(comm.world_size)]
            for op in ops_of(dtype) if count == 1001 else ["sum"]:
                tensor = inputs[comm.rank].clone()
                assert comm.all_reduce(tensor, op) is None
                want, what = expected(inputs, op), f"all_reduce {op} {dtype} {count}"
                if op == "avg":
                    torch.testing.assert_close(tensor, want, msg=lambda m, what=what: f"{what}: {m}")
                else:
                    equal(tensor, want, what)


def rounding(comm: zcomm.Communicator) -> None:
    """Values whose sums round: fp32 accumulation and one rounding, in rank order where the backend promises it."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in (33, 70_003):
            seeds = [torch.Generator().manual_seed(r) for r in range(comm.world_size)]
            inputs = [torch.randn(count, generator=seed).to(dtype) for seed in seeds]
            tensor = inputs[comm.rank].clone()
            comm.all_reduce(tensor)
            bits = comm.all_gather(tensor).view(comm.world_size, count)
            for rank in range(comm.world_size):
                equal(bits[rank], tensor, f"{dtype}: the bits of rank {rank}")
            total = inputs[0].float()
            for other in inputs[1:]:
                total = total + other.float()
            if comm.backend in RANK_ORDER:
                equal(tensor, total.to(dtype), f"{dtype} in rank order")
            else:
                exact = torch.stack([t.double() for t in inputs]).sum(0)
                bound = torch.finfo(dtype).eps * torch.stack([t.double().abs() for t in inputs]).sum(0)
                assert ((tensor.double() - exact).abs() <= comm.world_size * bound).all(), f"{dtype}: too far off"


def lists(comm: zcomm.Communicator) -> None:
    counts = [5, 0, 1000, 1, 40_001]
    inputs = [[numbers(n, torch.float32, r, i) for i, n in enumerate(counts)] for r in range(comm.world_size)]
    tensors = [tensor.clone() for tensor in inputs[comm.rank]]
    tensors[2] = tensors[2].reshape(10, 100)  # shapes stay
    comm.all_reduce(tensors, name="a list")
    assert tensors[2].shape == (10, 100)
    for i, tensor in enumerate(tensors):
        equal(tensor.reshape(-1), expected([inputs[r][i] for r in range(comm.world_size)], "sum"), f"item {i}")
    shards = comm.reduce_scatter([torch.ones(comm.world_size * n) for n in counts])
    assert [shard.tolist() for shard in shards] == [[comm.world_size] * n for n in counts]
    gathered = comm.all_gather([torch.full((n,), comm.rank) for n in counts])
    for n, bucket in zip(counts, gathered, strict=True):
        assert bucket.tolist() == [r for r in range(comm.world_size) for _ in range(n)]
    comm.all_reduce([torch.ones(1) for _ in range(300)])


def reduce(comm: zcomm.Communicator) -> None:
    for root in range(comm.world_size):
        for count in COUNTS:
            inputs = [numbers(count, torch.bfloat16, r, root) for r in range(comm.world_size)]
            tensor = inputs[comm.rank].clone()
            comm.reduce(tensor, root)
            want = expected(inputs, "sum") if comm.rank == root else inputs[comm.rank]
            equal(tensor, want, f"reduce to {root}, {count}")
    pair = [torch.full((3,), comm.rank), torch.full((2, 2), -comm.rank)]
    comm.reduce(pair, root=0, op="max")
    if comm.rank == 0:
        assert pair[0].tolist() == [comm.world_size - 1] * 3 and pair[1].tolist() == [[0, 0]] * 2


def reduce_scatter(comm: zcomm.Communicator) -> None:
    rank, world = comm.rank, comm.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for n in (0, 1, 33, 20_001):
            inputs = [numbers(world * n, dtype, r) for r in range(world)]
            mine = slice(rank * n, (rank + 1) * n)
            want, what = expected(inputs, "sum")[mine], f"reduce_scatter {dtype} {n}"
            bucket = inputs[rank].clone()
            equal(comm.reduce_scatter(bucket), want, what)
            equal(bucket, inputs[rank], f"{what}: the input")
            comm.reduce_scatter(bucket, out=bucket[mine])
            equal(bucket[mine], want, f"{what}, in place")
            if dtype == torch.bfloat16:
                out = torch.full((n,), 0.5)
                comm.reduce_scatter(inputs[rank].clone(), out=out, accumulate=True)
                equal(out, expected([t.float() for t in inputs], "sum")[mine] + 0.5, f"{what}, added to float32")


# ---- movements ----
def all_gather(comm: zcomm.Communicator) -> None:
    for dtype in (torch.float32, torch.uint8, torch.bool):
        for n in COUNTS:
            shards = [numbers(n, dtype, r) for r in range(comm.world_size)]
            equal(comm.all_gather(shards[comm.rank].clone()), torch.cat(shards), f"all_gather {dtype} {n}")
            out = comm.empty(n * comm.world_size, dtype=dtype)
            mine = out[comm.rank * n : (comm.rank + 1) * n]
            mine.copy_(shards[comm.rank])
            comm.all_gather(mine, out=out)
            equal(out, torch.cat(shards), f"all_gather {dtype} {n}, in place")


def broadcast(comm: zcomm.Communicator) -> None:
    for root in range(comm.world_size):
        for count in COUNTS:
            tensor = numbers(count, torch.float16, comm.rank, root)
            comm.broadcast(tensor, root=root)
            equal(tensor, numbers(count, torch.float16, root, root), f"broadcast from {root}, {count}")
    pair = [torch.full((3,), comm.rank), torch.full((2, 2), 10 * comm.rank)]
    comm.broadcast(pair, root=comm.world_size - 1)
    assert pair[0].tolist() == [comm.world_size - 1] * 3
    assert pair[1].tolist() == [[10 * (comm.world_size - 1)] * 2] * 2


def gather_and_scatter(comm: zcomm.Communicator) -> None:
    rank, world = comm.rank, comm.world_size
    for root in range(world):
        for n in (0, 1, 33, 20_001):
            shards = [numbers(n, torch.int32, r, root) for r in range(world)]
            got = comm.gather(shards[rank].clone(), root)
            assert (got is None) == (rank != root)
            if rank == root:
                equal(got, torch.cat(shards), f"gather to {root}, {n}")
            out = torch.zeros(n, dtype=torch.int32)
            comm.scatter(out, torch.cat(shards) if rank == root else None, root)
            equal(out, shards[rank], f"scatter from {root}, {n}")
    several = comm.gather([torch.full((2,), rank), torch.full((3,), 10 * rank)], root=0)
    if rank == 0:
        assert several[1].tolist() == [10 * r for r in range(world) for _ in range(3)]
    outs = [torch.zeros(2), torch.zeros(1)]
    comm.scatter(outs, [torch.arange(2.0 * world), torch.arange(1.0 * world)] if rank == 0 else None)
    assert outs[0].tolist() == [2 * rank, 2 * rank + 1] and outs[1].tolist() == [rank]
    whole = torch.arange(4.0 * world) * (rank == world - 1)  # both in place at the root
    part = whole[4 * rank : 4 * rank + 4] if rank == world - 1 else torch.zeros(4)
    comm.scatter(part, whole if rank == world - 1 else None, root=world - 1)
    part += 1
    comm.gather(part, root=world - 1, out=whole if rank == world - 1 else None)
    if rank == world - 1:
        equal(whole, torch.arange(4.0 * world) + 1, "scatter and gather in place")


def all_to_all(comm: zcomm.Communicator) -> None:
    rank, world = comm.rank, comm.world_size
    for n in (0, 1, 33, 10_001):
        parts = {(a, b): numbers((a + 2 * b) % 4 * n, torch.bfloat16, a, b) for a in range(world) for b in range(world)}
        inputs = [parts[rank, b].clone() for b in range(world)]
        outputs = [torch.empty_like(parts[a, rank]) for a in range(world)]
        comm.all_to_all(outputs, inputs)
        for a in range(world):
            equal(outputs[a], parts[a, rank], f"all_to_all of {a}, {n}")
        even = torch.cat([numbers(n, torch.float32, rank, b) for b in range(world)])
        out = torch.empty_like(even)
        comm.all_to_all(out, even)
        equal(out, torch.cat([numbers(n, torch.float32, a, rank) for a in range(world)]), f"all_to_all even {n}")


# ---- calls ----
def asynchronous(comm: zcomm.Communicator) -> None:
    """Several operations in flight; waited for in any order, polled, dropped."""
    world = comm.world_size
    tensors = [numbers(20_000, torch.float32, comm.rank, i) for i in range(6)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.done()
        work.wait()  # again: nothing happens
    for i, tensor in enumerate(tensors):
        equal(tensor, expected([numbers(20_000, torch.float32, r, i) for r in range(world)], "sum"), f"work {i}")
    shard, work = comm.reduce_scatter(torch.ones(4 * world), async_op=True)
    full, second = comm.all_gather(torch.full((3,), float(comm.rank)), async_op=True)
    while not second.done():
        time.sleep(0.001)
    work.wait(timeout=60)
    second.wait(timeout=60)
    assert shard.tolist() == [world] * 4
    assert full.tolist() == [float(r) for r in range(world) for _ in range(3)]
    queued = comm.all_reduce(torch.ones(5000), async_op=True)
    comm.barrier()  # blocking behind one that is not
    assert queued.done()
    dropped = torch.ones(30_000)
    comm.all_reduce(dropped, async_op=True)  # dropping the Work waits
    assert dropped.eq(world).all()


def bad_arguments(comm: zcomm.Communicator) -> None:
    """Refused on this rank before anything is sent; the communicator stays usable."""
    world = comm.world_size
    raises(ValueError, rf"{2 * world + 1}\b.*\b{world}\b", lambda: comm.reduce_scatter(torch.ones(2 * world + 1)))
    raises(ValueError, "avg", lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32), op="avg"))
    raises(ValueError, "contiguous", lambda: comm.all_reduce(torch.ones(4, 4).t()))
    raises(ValueError, str(world + 5), lambda: comm.broadcast(torch.ones(4), root=world + 5))
    raises(ValueError, "dst", lambda: comm.send(torch.ones(4), dst=comm.rank))
    raises(ValueError, "tag=-1", lambda: comm.send(torch.ones(4), dst=(comm.rank + 1) % world, tag=-1))
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [world] * 3


# ---- messages ----
def messages(comm: zcomm.Communicator) -> None:
    rank, world = comm.rank, comm.world_size
    right, left = (rank + 1) % world, (rank - 1) % world
    for count in (0, 1, 1000, 300_001):  # all ranks send first: small ones leave, large ones are asynchronous
        out, got = numbers(count, torch.float32, rank), torch.empty(count)
        work = comm.send(out, right, tag=count % 7, async_op=True)
        assert comm.recv(got, left, tag=count % 7) == left
        work.wait()
        equal(got, numbers(count, torch.float32, left), f"message of {count}")
    first, second = torch.full((5,), 1.0 + rank), torch.full((50_000,), 2.0 + rank)
    works = [comm.send(first, right, tag=1, async_op=True), comm.send(second, right, tag=2, async_op=True)]
    a, b = torch.empty(50_000), torch.empty(5)
    comm.recv(a, left, tag=2)  # not in the order of sending: tags tell them apart
    comm.recv(b, left, tag=1)
    assert a.eq(2 + left).all() and b.eq(1 + left).all()
    for work in works:
        work.wait()
    pieces, whole = [torch.full((n,), float(rank)) for n in (3, 0, 70_000, 2)], torch.empty(70_005)
    work = comm.send(pieces, right, async_op=True)
    comm.recv(whole, left)
    assert whole.eq(left).all()
    work.wait()
    order = [torch.full((40_000 if i % 2 else 8,), float(i)) for i in range(6)]  # one pair, one tag: in call order
    works = [comm.send(tensor, right, tag=9, async_op=True) for tensor in order]
    gots = [torch.empty_like(tensor) for tensor in order]
    receives = [comm.recv(got, left, tag=9, async_op=True) for got in gots]
    for work in (*receives, *works):
        work.wait()
    for got, want in zip(gots, order, strict=True):
        equal(got, want, "in call order")
    assert all(work.source == left for work in receives)


def any_source(comm: zcomm.Communicator) -> None:
    if comm.rank != 0:
        comm.send(torch.full((10,), float(comm.rank)), 0, tag=5)
    else:
        seen = []
        for _ in range(comm.world_size - 1):
            got = torch.empty(10)
            source = comm.recv(got, tag=5)
            assert got.eq(source).all()
            seen.append(source)
        assert sorted(seen) == list(range(1, comm.world_size))
    comm.barrier()


# ---- communicators ----
def split(comm: zcomm.Communicator) -> None:
    rank, world = comm.rank, comm.world_size
    part = comm.split(rank % 2, key=-rank)  # reversed
    members = [r for r in range(world) if r % 2 == rank % 2][::-1]
    assert (part.rank, part.world_size) == (members.index(rank), len(members))
    gathered = part.all_gather(torch.tensor([rank]))
    assert gathered.tolist() == members
    part.close()
    alone = comm.split(0 if rank == 0 else None)
    assert (alone is None) == (rank != 0)
    if alone is not None:
        tensor = torch.ones(3)
        alone.all_reduce(tensor)
        assert tensor.tolist() == [1] * 3
        alone.close()


def duplicates_keep_their_own_order(comm: zcomm.Communicator) -> None:
    twin = comm.duplicate()
    a, b = torch.ones(1000), torch.full((1000,), 2.0)
    if comm.rank == 0:
        works = [comm.all_reduce(a, async_op=True), twin.all_reduce(b, async_op=True)]
    else:
        works = [twin.all_reduce(b, async_op=True), comm.all_reduce(a, async_op=True)]
    for work in works:
        work.wait()
    assert a.eq(comm.world_size).all() and b.eq(2 * comm.world_size).all()
    twin.close()
    raises(RuntimeError, "closed", lambda: twin.barrier())
    comm.barrier()


# ---- the guard ----
def _count(comm: zcomm.Communicator, odd: bool) -> None:
    comm.all_reduce(torch.ones(123 if odd else 100))


def _dtype(comm: zcomm.Communicator, odd: bool) -> None:
    comm.all_reduce(torch.ones(64, dtype=torch.bfloat16 if odd else torch.float32))


def _operation(comm: zcomm.Communicator, odd: bool) -> None:
    comm.broadcast(torch.ones(64)) if odd else comm.all_reduce(torch.ones(64))


def _reduction(comm: zcomm.Communicator, odd: bool) -> None:
    comm.all_reduce(torch.ones(64), op="max" if odd else "sum")


def _root(comm: zcomm.Communicator, odd: bool) -> None:
    comm.broadcast(torch.ones(64), root=1 if odd else 0)


def _name(comm: zcomm.Communicator, odd: bool) -> None:
    comm.all_reduce(torch.ones(64), name="grad.1" if odd else "grad.0")


MISMATCHES: list[tuple[Callable[[zcomm.Communicator, bool], None], str, str]] = [
    (_count, "count=100", "count=123"),
    (_dtype, "float32", "bfloat16"),
    (_operation, "all_reduce", "broadcast"),
    (_reduction, "sum", "max"),
    (_root, "root=0", "root=1"),
    (_name, "grad.0", "grad.1"),
]


def mismatches(comm: zcomm.Communicator) -> None:
    for call, one, other in MISMATCHES:
        twin = comm.duplicate()
        odd = comm.rank == comm.world_size - 1
        message = raises(zcomm.CollectiveMismatch, one, lambda call=call, twin=twin, odd=odd: call(twin, odd))
        assert other in message and f"rank {comm.world_size - 1}" in message, message
        raises(zcomm.CollectiveMismatch, "unusable since", lambda twin=twin: twin.barrier())
        twin.close()
    tensor = torch.ones(2)
    comm.all_reduce(tensor)  # the one they came from is whole
    assert tensor.tolist() == [comm.world_size] * 2


def all_to_all_mismatch(comm: zcomm.Communicator) -> None:
    twin = comm.duplicate()
    inputs = [torch.ones(3) for _ in range(comm.world_size)]
    outputs = [torch.ones(4 if comm.rank == 1 and source == 0 else 3) for source in range(comm.world_size)]
    pattern = "rank 0 sends 3 elements to rank 1, which expects 4"
    raises(zcomm.CollectiveMismatch, pattern, lambda: twin.all_to_all(outputs, inputs))
    twin.close()
    comm.barrier()


def message_mismatch(comm: zcomm.Communicator) -> None:
    """Ends the two calls it is about, or a later one of the sender's if its small message was gone; nothing else."""
    for count in (100, 50_000):
        if comm.rank == 0:
            raises(zcomm.CollectiveMismatch, "rank 1", lambda n=count: send_until_it_fails(comm, n))
        elif comm.rank == 1:
            raises(zcomm.CollectiveMismatch, "rank 0", lambda n=count: comm.recv(torch.ones(n + 1), 0))
        comm.barrier()


def send_until_it_fails(comm: zcomm.Communicator, count: int) -> None:
    """A small message is gone before anybody looks at it: then the recv that waits for its receiver tells."""
    comm.send(torch.ones(count), 1)
    comm.recv(torch.ones(1), 1, tag=77)


def rank_that_leaves(comm: zcomm.Communicator) -> None:
    twin = comm.duplicate()
    leaver = comm.world_size - 1
    if comm.rank == leaver:
        twin.close()
    else:
        begun = time.monotonic()
        raises(zcomm.PeerLost, rf"rank {leaver} left", lambda: twin.all_reduce(torch.ones(70_003)))
        assert time.monotonic() - begun < 20, "noticed by the deadline only"
        twin.close()
    comm.barrier()


def suspended_deadline(comm: zcomm.Communicator) -> None:
    with comm.no_deadline():
        comm.barrier()
    tensor = comm.empty(1000)
    tensor.fill_(1)
    comm.all_reduce(tensor)
    assert tensor.eq(comm.world_size).all()
    assert comm.memory()["allocation_count"] >= 1


SUITE: list[Callable[[zcomm.Communicator], None]] = [
    *(all_reduce, rounding, lists, reduce, reduce_scatter),
    *(all_gather, broadcast, gather_and_scatter, all_to_all),
    *(asynchronous, bad_arguments, messages, any_source),
    *(split, duplicates_keep_their_own_order, suspended_deadline),
    *(mismatches, all_to_all_mismatch, message_mismatch, rank_that_leaves),
]


def run_suite(backend: str, ranks_per_host: int = 0) -> list[str]:
    """What failed on this rank. Each check has a communicator of its own: one failure does not spoil the rest."""
    comm = _init(backend, ranks_per_host, timeout=30.0)
    failed = [failure for check in SUITE for failure in _run(check, comm)]
    try:
        comm.barrier()
    except (RuntimeError, OSError) as error:
        failed.append(f"the communicator of all: {error}")
    zcomm.shutdown()
    return failed


def _run(check: Callable[[zcomm.Communicator], None], comm: zcomm.Communicator) -> list[str]:
    try:
        own = comm.duplicate()
        check(own)
        own.close()
    except (AssertionError, RuntimeError, OSError, NotImplementedError, ValueError):
        return [f"{check.__name__}: {traceback.format_exc(limit=-3)}"]
    return []


def run_late_rank(backend: str, ranks_per_host: int = 0) -> list[str]:
    """A rank that does not come is named at the deadline, with the call that waits for it; then shutdown is orderly."""
    comm = _init(backend, ranks_per_host, timeout=2.0)
    late = comm.world_size - 1
    tensor = torch.ones(8)
    comm.all_reduce(tensor)
    raises(TimeoutError, r"recv", lambda: comm.recv(torch.empty(3), src=(comm.rank + 1) % comm.world_size, tag=3))
    comm.barrier()  # a message that nobody sent leaves the collectives as they were
    with comm.no_deadline():  # slow set-up by one rank
        time.sleep(3.0 if comm.rank == 0 else 0)
    comm.all_reduce(tensor)
    if comm.rank == late:
        time.sleep(4.0)
    else:
        # Inside of a host of a hierarchical communicator ranks are counted from 0; the message says of which.
        named = rf"all_reduce float32.*'loss'.*(rank {late}|ranks .*{late} of one host)"
        raises(TimeoutError, named, lambda: comm.all_reduce(tensor, name="loss"))
        raises(TimeoutError, "unusable since", lambda: comm.barrier())
    zcomm.shutdown()
    return []


def run_small_blocks(backend: str) -> list[str]:
    """Blocks of 4 KiB: modest buffers take many, and lists cross them."""
    from zcomm.backends import _mpi_messages

    comm = _init(backend, 0, timeout=30.0)
    _mpi_messages.BLOCK_NBYTES = 4096
    comm._core._block_nbytes = 4096  # of the communicators that are split from it
    failed = []
    for check in (all_reduce, rounding, lists, reduce, reduce_scatter, all_gather, broadcast, gather_and_scatter):
        failed += _run(check, comm)
    part = comm.split(0)
    assert part._core._moves.block_nbytes == 4096
    part._core._moves.message_nbytes = 4096
    for check in (all_to_all, messages):
        check(part)
    assert part.memory()["slot_nbytes"] < 1 << 20
    zcomm.shutdown()
    return failed


def run_stopped_rank(backend: str) -> list[str]:
    """A rank that the system has stopped in the middle of an operation: the others end at the deadline."""
    comm = _init(backend, 0, timeout=2.0)
    late = comm.world_size - 1
    if comm.rank == late:
        stopped_for(6.0)  # the process as a whole
    else:
        big = torch.ones(3_000_000)
        raises(TimeoutError, rf"waited 2 s for rank {late}", lambda: comm.all_reduce(big))
    time.sleep(0.1)
    zcomm.shutdown()
    return []


def stopped_for(seconds: float) -> None:
    pid = os.getpid()
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def run_serialized(backend: str) -> list[str]:
    """An MPI that one thread at a time may call: nothing moves by itself, everything ends when it is waited for."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    comm = _init(backend, 0, timeout=30.0)
    failed = [*_run(asynchronous, comm), *_run(messages, comm), *_run(duplicates_keep_their_own_order, comm)]
    assert not [t for t in threading.enumerate() if t.name == "zcomm-mpi"]
    zcomm.shutdown()
    return failed


def run_edges(backend: str) -> list[str]:
    """One job after another in the same processes: a failure leaves nothing behind that the next one meets."""
    return [*run_late_rank(backend), *run_stopped_rank(backend), *run_small_blocks(backend)]


JOBS: dict[str, Callable[[str], list[str]]] = {"suite": run_suite, "edges": run_edges, "serialized": run_serialized}


def _init(backend: str, ranks_per_host: int, timeout: float) -> zcomm.Communicator:
    torch.set_num_threads(1)
    if ranks_per_host:
        os.environ["ZCOMM_HOST_ID"] = f"host-{int(os.environ['RANK']) // ranks_per_host}"
    comm = zcomm.init(backend, timeout=timeout)
    assert comm.backend == backend, comm.describe()
    return comm


if __name__ == "__main__":
    folder, job = Path(sys.argv[1]), sys.argv[2]
    from mpi4py import MPI

    failures = JOBS[job]("mpi")
    (folder / f"rank{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(failures))
