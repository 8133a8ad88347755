"""An episode of collectives: asynchronous, dropped, with callbacks, in parts, on every kind of tensor.

Values are small integers, so that each result is exact.
"""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from soaking.plan import Episode

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64)
Pending = tuple[Any, torch.Tensor, torch.Tensor, str]  # Work or None, result, expected result, name


def play(episode: Episode, comm: Any, store: str) -> str:
    """Play the episode on this rank; return its failures as text, or ""."""
    pick = random.Random(episode.seed + 1)
    wrong = _collectives(pick, comm)
    part = comm.split(comm.rank % 2, comm.rank)
    wrong += _collectives(random.Random(episode.seed + 2 + comm.rank % 2), part)
    part.close()
    wrong += _callbacks(pick, comm, store)
    return "; ".join(wrong)


def values(rank: int, count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def _collectives(pick: random.Random, comm: Any) -> list[str]:
    """Run a number of operations in one order; wait for some late, for some never."""
    wrong: list[str] = []
    pending: list[Pending] = []
    for number in range(pick.randrange(10, 40)):
        operation = pick.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send"))
        count = pick.choice((1, 3, 64, 1000, 4097, 70001))
        dtype, how = pick.choice(DTYPES), pick.choice(("wait", "later", "drop", "sync"))
        every = [values(rank, count * comm.world_size, dtype, number) for rank in range(comm.world_size)]
        symmetric = pick.random() < 0.3
        root = pick.randrange(comm.world_size)
        if operation == "send" and comm.world_size == 1:
            continue
        work, result, wanted = _start(comm, operation, count, every, root, symmetric, how != "sync")
        name = f"{operation} {number} of {count} {dtype}, {how}"
        if how == "wait" and work is not None:
            work.wait()
        if how in ("wait", "sync"):
            _compare(wrong, result, wanted, name)
        elif how == "later":
            pending.append((work, result, wanted, name))
        else:
            pending.append((None, result, wanted, name))
        del work
    for work, result, wanted, name in pending:
        if work is not None:
            work.wait()
            _compare(wrong, result, wanted, name)
    comm.barrier()
    for work, result, wanted, name in pending:  # a dropped Work is done by now: the barrier came after it
        if work is None:
            _compare(wrong, result, wanted, name)
    return wrong


def _compare(wrong: list[str], result: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    if not torch.equal(result, wanted):
        wrong.append(f"{name}: {int((result != wanted).sum())} elements are wrong")


def _start(
    comm: Any, operation: str, count: int, every: list[torch.Tensor], root: int, symmetric: bool, later: bool
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Start an operation. Returns: its Work (None if it is done), its result and the expected result."""
    rank, size = comm.rank, comm.world_size
    mine = every[rank]

    def room(n: int) -> torch.Tensor:
        return comm.empty(n, mine.dtype) if symmetric else torch.zeros(n, dtype=mine.dtype)

    if operation == "all_reduce":
        tensor = room(count).copy_(mine[:count])
        wanted = torch.stack([v[:count] for v in every]).sum(0).to(mine.dtype)
        return comm.all_reduce(tensor, async_op=later), tensor, wanted
    if operation == "broadcast":
        tensor = room(count).copy_(mine[:count])
        return comm.broadcast(tensor, root, async_op=later), tensor, every[root][:count]
    if operation == "all_gather":
        out = room(count * size)
        work = comm.all_gather(mine[:count].clone(), out=out, async_op=later)
        return _work(work, later), out, torch.cat([v[:count] for v in every])
    if operation == "reduce_scatter":
        out = room(count)
        work = comm.reduce_scatter(mine.clone(), out=out, async_op=later)
        total = torch.stack(every).sum(0).to(mine.dtype)
        return _work(work, later), out, total[rank * count : (rank + 1) * count]
    if operation == "all_to_all":
        out = room(count * size)
        work = comm.all_to_all(out, mine.clone(), async_op=later)
        return _work(work, later), out, torch.cat([v[rank * count : (rank + 1) * count] for v in every])
    out = room(count)
    sent = comm.send(mine[:count].clone(), (rank + 1) % size, async_op=True)
    work = comm.recv(out, (rank - 1) % size, async_op=later)
    sent.wait()
    return _work(work, later), out, every[(rank - 1) % size][:count]


def _work(started: Any, later: bool) -> Any:
    """Return the Work in the return value of an operation with an out."""
    found = started[-1] if isinstance(started, tuple) else started
    return found if later else None


def _callbacks(pick: random.Random, comm: Any, store: str) -> list[str]:
    """Register callbacks on torch.distributed's Futures, and drop some Futures."""
    import zcomm.torch_backend  # noqa: F401

    wrong: list[str] = []
    dist.init_process_group(
        "zcomm",
        init_method=f"file://{store}-torch",
        rank=comm.rank,
        world_size=comm.world_size,
        timeout=timedelta(seconds=30),
    )
    try:
        futures: list[tuple[torch.futures.Future[Any], torch.Tensor]] = []
        for number in range(pick.randrange(5, 15)):
            every = [values(rank, 300, torch.float32, number) for rank in range(comm.world_size)]
            tensor, total = every[comm.rank].clone(), torch.stack(every).sum(0)
            work = dist.all_reduce(tensor, async_op=True)
            future = work.get_future().then(lambda done: done.value()[0] * 2)
            if pick.random() < 0.6:
                futures.append((future, 2 * total))
            del work, future
        for future, wanted in futures:
            _compare(wrong, future.wait(), wanted, "a future's callback")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return wrong
