"""reduce, gather, scatter and all_to_all from Python, against torch's results for all ranks' inputs.

As in test_comm.py, one world runs many checks: worlds of 1 (in this process), 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from comm_values import DTYPES, OPS, check_equal, counts_of, failures_of, make, symmetric_copy
from tiers import slow


def reduce_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for count in counts_of(dtype):
            inputs = [make(count, dtype, r) for r in range(world)]
            root = count % world
            for op in OPS if count <= 1001 else ["sum"]:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                everywhere = inputs[rank].clone()
                zcomm.all_reduce(everywhere, op)
                for tensor in (inputs[rank].clone(), symmetric_copy(inputs[rank])):
                    assert zcomm.reduce(tensor, root, op) is None
                    want = everywhere if rank == root else inputs[rank]  # the bits of all_reduce, or unchanged
                    check_equal(tensor, want, f"reduce {op} {dtype} {count} to {root}")
    pair = [torch.full((3,), float(rank)), torch.full((2, 2), 10.0 * rank)]
    zcomm.reduce(pair, root=world - 1, op="max", name="pair")
    assert pair[0].tolist() == [float(rank)] * 3 and pair[1].tolist() == [[10.0 * rank] * 2] * 2  # the last is the max


def gather_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for n in (0, 1, 33, 100_001):
            shards = [make(n, dtype, r) for r in range(world)]
            want = torch.cat(shards)
            for root in {0, world - 1}:
                what = f"gather {dtype} {n} to {root}"
                got = zcomm.gather(shards[rank].clone(), root)
                assert (got is None) == (rank != root)
                if rank == root:
                    check_equal(got, want, what)
                out = zcomm.empty(world * n, dtype=dtype)
                mine = out[rank * n : (rank + 1) * n]  # in place at root
                mine.copy_(shards[rank])
                got = zcomm.gather(mine, root, out=out if rank == root else None)
                if rank == root:
                    assert got is out
                    check_equal(out, want, f"{what}, in place on the symmetric heap")
    lists = zcomm.gather([torch.full((2,), rank), torch.full((1, 2), 10 * rank)], root=0)
    if rank == 0:
        assert [t.tolist() for t in lists] == [[v * r for r in range(world) for _ in range(2)] for v in (1, 10)]


def scatter_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for n in (0, 1, 33, 100_001):
            for root in {0, world - 1}:
                bucket = make(world * n, dtype, root)
                want = bucket[rank * n : (rank + 1) * n]
                what = f"scatter {dtype} {n} from {root}"
                out = torch.empty(n, dtype=dtype)
                assert zcomm.scatter(out, bucket.clone() if rank == root else None, root) is None
                check_equal(out, want, what)
                symmetric = symmetric_copy(bucket)
                out = symmetric[rank * n : (rank + 1) * n] if rank == root else torch.empty(n, dtype=dtype)
                zcomm.scatter(out, symmetric if rank == root else None, root)
                check_equal(out, want, f"{what}, in place on the symmetric heap")
                check_equal(symmetric, bucket, f"{what}: the buckets are left alone")


def all_to_all_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()

    def part(source: int, target: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return make(count, dtype, source, seed=target + 1)

    for dtype in DTYPES:
        for n in (0, 1, 33, 40_001):
            splits = {
                "even": [[n] * world] * world,
                "uneven": [[(n * (1 + a + 2 * b)) // (2 * world) for b in range(world)] for a in range(world)],
                "sparse": [[n if b == (a + 1) % world else 0 for b in range(world)] for a in range(world)],
            }
            for kind, counts in splits.items():
                what = f"all_to_all {kind} {dtype} {n}"
                inputs = [part(rank, b, counts[rank][b], dtype) for b in range(world)]
                want = [part(a, rank, counts[a][rank], dtype) for a in range(world)]
                outputs = [torch.empty_like(tensor) for tensor in want]
                assert zcomm.all_to_all(outputs, inputs) is None
                for a in range(world):
                    check_equal(outputs[a], want[a], f"{what} of {a}, lists")
                most = max(sum(row) for row in counts)
                flat = zcomm.empty(most, dtype=dtype)[: sum(counts[rank])]
                flat.copy_(torch.cat(inputs))
                out = torch.empty(sum(t.numel() for t in want), dtype=dtype)
                zcomm.all_to_all(out, flat, in_splits=counts[rank], out_splits=[t.numel() for t in want])
                check_equal(out, torch.cat(want), f"{what}, symmetric input with splits")
                if kind == "even":
                    zcomm.all_to_all(out.zero_(), flat.clone())
                    check_equal(out, torch.cat(want), f"{what}, without splits")


def bad_arguments() -> None:
    """Raise on this rank before any message is sent; the communicator stays usable."""
    rank, world = zcomm.rank(), zcomm.world_size()
    for call in (zcomm.reduce, zcomm.gather, lambda t, root: zcomm.scatter(t, t, root)):
        with pytest.raises(ValueError, match=rf"root={world}\b"):
            call(torch.ones(world), world)
        with pytest.raises(ValueError, match="root=-1"):
            call(torch.ones(world), -1)
    with pytest.raises(ValueError, match="avg of int32"):
        zcomm.reduce(torch.ones(3, dtype=torch.int32), op="avg")
    if rank == 0:
        with pytest.raises(ValueError, match=rf"{4 * world + 1} elements.*\b4\b"):
            zcomm.gather(torch.ones(4), out=torch.ones(4 * world + 1))
        with pytest.raises(ValueError, match=r"int32.*float64|float64.*int32"):
            zcomm.gather(torch.ones(4, dtype=torch.int32), out=torch.ones(4 * world, dtype=torch.float64))
        with pytest.raises(ValueError, match="root=0 must give"):
            zcomm.scatter(torch.ones(4))
        with pytest.raises(ValueError, match=rf"{4 * world + 1} elements"):
            zcomm.scatter(torch.ones(4), torch.ones(4 * world + 1))
    else:
        with pytest.raises(ValueError, match=rf"rank {rank}.*root=0"):
            zcomm.gather(torch.ones(4), out=torch.ones(4 * world))
        with pytest.raises(ValueError, match=rf"rank {rank}.*root=0"):
            zcomm.scatter(torch.ones(4), torch.ones(4 * world))
    parts = [torch.ones(1)] * world
    with pytest.raises(ValueError, match=rf"{world + 1} tensors.*\b{world} ranks"):
        zcomm.all_to_all(parts, [*parts, torch.ones(1)])
    with pytest.raises(ValueError, match="one tensor, not for a list"):
        zcomm.all_to_all(parts, parts, in_splits=[1] * world)
    with pytest.raises(ValueError, match=rf"sum is {world}\b"):
        zcomm.all_to_all(torch.ones(world), torch.ones(world), in_splits=[2] * world)
    with pytest.raises(ValueError, match=">= 0"):
        zcomm.all_to_all(torch.ones(world), torch.ones(world), out_splits=[world + 1, -1] + [0] * (world - 2))
    with pytest.raises(ValueError, match=r"float32.*int64|int64.*float32"):
        zcomm.all_to_all(parts, [torch.ones(1, dtype=torch.int64)] * world)
    if world > 1:
        with pytest.raises(ValueError, match=rf"count {world + 1} does not divide by world_size {world}"):
            zcomm.all_to_all(torch.ones(world), torch.ones(world + 1))
    zcomm.barrier()


VALUES: list[Callable[[], None]] = [reduce_values, gather_values, scatter_values, all_to_all_values, bad_arguments]


@pytest.mark.parametrize("check", VALUES, ids=lambda check: check.__name__)
def test_world_1(check: Callable[[], None], world_of_one: None) -> None:
    assert zcomm.world_size() == 1
    check()


def all_values() -> list[str]:
    return failures_of(VALUES)


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_values(world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(all_values, world_size) == [[]] * world_size


def splits_that_differ() -> str:
    """Rank 1 sends 5 elements to rank 2, which expects 7; all other splits agree."""
    comm = zcomm.init(timeout=30.0)
    inputs = [torch.ones(5 if (comm.rank, q) == (1, 2) else 3) for q in range(3)]
    outputs = [torch.zeros(7 if (q, comm.rank) == (1, 2) else 3) for q in range(3)]
    with pytest.raises(zcomm.CollectiveMismatch) as caught:
        comm.all_to_all(outputs, inputs, name="tokens")
    assert all(tensor.count_nonzero() == 0 for tensor in outputs)
    with pytest.raises(zcomm.CollectiveMismatch, match="unusable since"):
        comm.barrier()
    return str(caught.value)


def test_splits_that_differ_are_named_on_all_ranks(run_ranks: Callable[..., list[Any]]) -> None:
    messages = run_ranks(splits_that_differ, 3)
    assert len(set(messages)) == 1, messages
    assert "rank 1 sends 5 elements to rank 2, which expects 7" in messages[0]
    assert "'tokens'" in messages[0] and "test_comm_movements.py:" in messages[0]
