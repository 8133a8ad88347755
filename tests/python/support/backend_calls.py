"""Checks of calls on any backend: asynchronous ones, messages, communicators, and the guard."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import zcomm
from backend_values import equal, expected, numbers, raises


# ---- calls ----
def asynchronous(comm: zcomm.Communicator) -> None:
    """Works of several pending operations: waited for in any order, polled, dropped."""
    world = comm.world_size
    tensors = [numbers(20_000, torch.float32, comm.rank, i) for i in range(6)]
    works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.done()
        work.wait()  # a second wait does nothing
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
    comm.barrier()  # a blocking call after an asynchronous one
    assert queued.done()
    dropped = torch.ones(30_000)
    comm.all_reduce(dropped, async_op=True)  # dropping the Work waits
    assert dropped.eq(world).all()


def bad_arguments(comm: zcomm.Communicator) -> None:
    """Raise on this rank before any message is sent; the communicator stays usable."""
    world = comm.world_size
    raises(ValueError, rf"{2 * world + 1}\b.*\b{world}\b", lambda: comm.reduce_scatter(torch.ones(2 * world + 1)))
    raises(ValueError, "avg", lambda: comm.all_reduce(torch.ones(4, dtype=torch.int32), op="avg"))
    raises(ValueError, "contiguous", lambda: comm.all_reduce(torch.ones(4, 4).t()))
    meta = torch.ones(2, device="meta")
    mixed = r"tensor {} of shape \({},\) is on {}, others are on {}; one operation has one device"
    raises(ValueError, mixed.format(1, 2, "meta", "cpu"), lambda: comm.all_reduce([torch.ones(3), meta]))
    raises(ValueError, mixed.format(0, 2, "meta", "cpu"), lambda: comm.reduce_scatter(torch.ones(2 * world), out=meta))
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
    comm.recv(a, left, tag=2)  # not in the order of sending: tags distinguish them
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


def messages_on_device(comm: zcomm.Communicator) -> None:
    """On the tensors' device: a send reads after earlier work of the stream, later work runs after a receive."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    for count in (0, 5, 1_000_003):
        out = numbers(count, torch.float32, comm.rank).to(comm.device) * 3
        work = comm.send(out, right, async_op=True)
        out.fill_(-1.0)
        got = torch.zeros(count, device=comm.device)
        assert comm.recv(got, left) == left
        equal((got + 1).cpu(), numbers(count, torch.float32, left) * 3 + 1, f"message of {count}")
        work.wait()
        got.fill_(-2.0)
        receiving = comm.recv(got, left, tag=1, async_op=True)
        sending = comm.send(numbers(count, torch.float32, comm.rank).to(comm.device), right, tag=1, async_op=True)
        receiving.wait()
        sending.wait()
        equal((got * 2).cpu(), numbers(count, torch.float32, left) * 2, f"asynchronous message of {count}")


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
    comm.all_reduce(tensor)  # their parent stays usable
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
    """End the two calls, or a later one of the sender if its small message was already sent; no other call raises."""
    for count in (100, 50_000):
        if comm.rank == 0:
            raises(zcomm.CollectiveMismatch, "rank 1", lambda n=count: send_until_it_fails(comm, n))
        elif comm.rank == 1:
            raises(zcomm.CollectiveMismatch, "rank 0", lambda n=count: comm.recv(torch.ones(n + 1), 0))
        comm.barrier()


def send_until_it_fails(comm: zcomm.Communicator, count: int) -> None:
    """Send a small message, complete before any rank reads it: the recv that waits for its receiver raises."""
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


def buffers_that_share_memory(comm: zcomm.Communicator) -> None:
    """Accept operations in place; refuse any other overlap with both addresses; the communicator stays usable."""
    rank, world = comm.rank, comm.world_size
    for n in (4, 100_000):
        for symmetric in (False, True):
            whole = comm.empty(world * n) if symmetric else torch.empty(world * n)
            own = whole[rank * n : (rank + 1) * n]
            own.fill_(rank + 1)
            comm.all_gather(own, out=whole)
            assert whole[::n].tolist() == [r + 1 for r in range(world)]
            comm.reduce_scatter(whole, out=own)
            assert own.unique().tolist() == [world * (rank + 1)]
            comm.gather(own, 0, out=whole if rank == 0 else None)
            assert rank != 0 or whole[n - 1 :: n].tolist() == [world * (r + 1) for r in range(world)]
            comm.scatter(own, whole if rank == 0 else None, 0)
            assert own.unique().tolist() == [world * (rank + 1)]
            first = (rank + 1) % world * n
            other = whole[first : first + n]
            refused: list[tuple[str, Callable[[], object]]] = [
                ("all_gather: input 0 .* output 0", lambda o=other, w=whole: comm.all_gather(o, out=w)),
                ("reduce_scatter: input 0 .* output 0", lambda o=other, w=whole: comm.reduce_scatter(w, out=o)),
                ("with accumulate", lambda o=own, w=whole: comm.reduce_scatter(w, out=o, accumulate=True)),
                ("all_to_all: input .* output", lambda w=whole: comm.all_to_all(w, w)),
                ("all_reduce: output 0 .* output 1", lambda w=whole: comm.all_reduce([w[:3], w[2:]])),
                ("broadcast: output 0 .* output 1", lambda o=own: comm.broadcast([o, o])),
            ]
            if rank == 0:
                refused += [
                    ("gather: input 0 .* output 0", lambda o=other, w=whole: comm.gather(o, 0, out=w)),
                    ("scatter: input 0 .* output 0", lambda o=other, w=whole: comm.scatter(o, w, 0)),
                ]
            for message, call in refused:
                raises(ValueError, message, call)
                raises(ValueError, r"\[0x[0-9a-f]+, 0x[0-9a-f]+\) and output \d at \[0x[0-9a-f]+, .* overlap; ", call)
    total = torch.ones(3)
    comm.all_reduce(total)
    assert total.tolist() == [world] * 3
