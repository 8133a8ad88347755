"""Checks of results on any backend: reductions and movements, each of a communicator of any kind.

Oracles: exact results of small integers. On backends that sum in rank order, the bits of that sum. On others, equal
bits on all ranks and closeness to float64.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

import zcomm

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
COUNTS = [0, 1, 65, 1001, 70_003]
RANK_ORDER = ("shm", "mpi", "cuda_ipc")  # backends with the bits of the bitwise contract in their sums


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
    """Check sums that round: fp32 accumulation and one rounding, in rank order if the backend promises it."""
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
            if comm.backend in (*RANK_ORDER, "tcp"):
                ordered = inputs[comm.rank].clone()
                comm.all_reduce(ordered, order="rank")
                equal(ordered, total.to(dtype), f"{dtype} in the rank order that was asked for")
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
    tensors[2] = tensors[2].reshape(10, 100)  # shapes are kept
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
