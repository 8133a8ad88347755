"""Collectives from Python: every rank compares its result with torch's result for all ranks' inputs.

One world runs many checks: `_values` is called in worlds of 1 (in this process), 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from comm_values import COUNTS, DTYPES, OPS, check_close, check_equal, counts_of, expected, failures_of, make
from tiers import slow


# ---- values, in every world ----
def all_reduce_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for count in counts_of(dtype):
            inputs = [make(count, dtype, r) for r in range(world)]
            for op in OPS:
                if op == "avg" and not dtype.is_floating_point:
                    continue
                what = f"all_reduce {op} {dtype} {count}"
                private = inputs[rank].clone()
                assert zcomm.all_reduce(private, op) is None
                symmetric = zcomm.empty(count, dtype=dtype)
                symmetric.copy_(inputs[rank])
                zcomm.all_reduce(symmetric, op)
                compare = check_close if op == "avg" else check_equal
                compare(private, expected(inputs, op), what)
                check_equal(symmetric, private, f"{what}, symmetric against private")


def all_reduce_rank_order() -> None:
    """Compare sums that round with the bits of an fp32 sum in rank order, for symmetric and private memory."""
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = [torch.randn(100_003, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
        total = inputs[0].float()
        for other in inputs[1:]:
            total = total + other.float()
        private = inputs[rank].clone()
        zcomm.all_reduce(private)
        symmetric = zcomm.empty(private.numel(), dtype=dtype)
        symmetric.copy_(inputs[rank])
        zcomm.all_reduce(symmetric)
        check_equal(private, total.to(dtype), f"private {dtype}")
        check_equal(symmetric, total.to(dtype), f"symmetric {dtype}")


def list_is_one_operation() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    counts = [5, 0, 1000, 1, 70_001]
    inputs = [[make(n, torch.float32, r, seed=i) for i, n in enumerate(counts)] for r in range(world)]
    tensors = [tensor.clone() for tensor in inputs[rank]]
    tensors[2] = tensors[2].reshape(10, 100)  # shapes are kept
    zcomm.all_reduce(tensors)
    assert tensors[2].shape == (10, 100)
    for i, tensor in enumerate(tensors):
        check_equal(tensor.reshape(-1), expected([inputs[r][i] for r in range(world)], "sum"), f"list item {i}")


def one_tensor_in_many_guises() -> None:
    """Mix forms of a tensor between ranks in one operation; a plain one is read by a shorter path than the others."""
    rank, world = zcomm.rank(), zcomm.world_size()
    whole = torch.zeros(20)
    guises: list[tuple[torch.Tensor, Any]] = [(t := torch.zeros(7), t), (t := torch.zeros(7), [t])]
    guises += [(t := torch.nn.Parameter(torch.zeros(7)), t), (whole[3:10], whole[3:10]), (t := torch.zeros(7, 1), t)]
    for turn in range(len(guises)):
        tensor, passed = guises[(turn + rank) % len(guises)]
        tensor.data.fill_(rank + 1)
        zcomm.all_reduce(passed, async_op=True).wait() if turn % 2 else zcomm.all_reduce(passed)
        assert tensor.flatten().tolist() == [world * (world + 1) / 2] * 7, (turn, rank)
    assert whole[:3].tolist() + whole[10:].tolist() == [0.0] * 13
    for bad in (torch.zeros(4, 4).t(), torch.zeros(4).to_sparse(), torch.zeros(4, dtype=torch.int16)):
        with pytest.raises(ValueError, match=r"not contiguous|layout|int16"):
            zcomm.all_reduce(bad)
    negated = torch._neg_view(torch.arange(float(world * 2)))
    plain, part = torch.zeros(world * 2), torch.zeros(2)
    for refused in (
        lambda: zcomm.all_reduce(negated, "max"),
        lambda: zcomm.all_reduce([plain, negated], "max", async_op=True),
        lambda: zcomm.reduce(negated),
        lambda: zcomm.reduce_scatter(negated),
        lambda: zcomm.reduce_scatter(plain, out=negated[:2]),
        lambda: zcomm.all_gather(negated),
        lambda: zcomm.all_gather(part, out=negated),
        lambda: zcomm.broadcast(negated),
        lambda: zcomm.gather(negated),
        lambda: zcomm.scatter(negated[:2], plain if rank == 0 else None),
        lambda: zcomm.all_to_all(plain, negated),
        lambda: zcomm.all_to_all(list(negated.chunk(world)), list(plain.chunk(world))),
        lambda: zcomm.send(negated, (rank + 1) % world),
        lambda: zcomm.recv(negated, (rank + 1) % world),
    ):
        with pytest.raises(ValueError, match=r"negated view.*resolve_neg\(\)"):
            refused()
    with pytest.raises(ValueError, match="null pointer"):
        zcomm.all_reduce(torch._efficientzerotensor(7))
    freed = torch.ones(8)[4:]
    freed.untyped_storage().resize_(8)
    for call in (zcomm.all_reduce, zcomm.broadcast, zcomm.all_gather):
        with pytest.raises(ValueError, match="less memory than elements"):
            call(freed)
    weight, x = torch.ones(4, requires_grad=True), torch.ones(4)
    loss = (weight * x).sum()
    zcomm.all_reduce(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(NotImplementedError, match="meta"):
        zcomm.all_reduce(torch.zeros(4, device="meta"))


def reduce_scatter_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for n in (0, 1, 33, 100_001):
            inputs = [make(world * n, dtype, r) for r in range(world)]
            want = expected(inputs, "sum")[rank * n : (rank + 1) * n]
            what = f"reduce_scatter {dtype} {n}"
            bucket = inputs[rank].clone()
            shard = zcomm.reduce_scatter(bucket)
            check_equal(shard, want, what)
            check_equal(bucket, inputs[rank], f"{what}: the input is left alone")
            out = torch.empty(n, dtype=dtype)
            assert zcomm.reduce_scatter(bucket, out=out).data_ptr() == out.data_ptr()
            check_equal(out, want, f"{what}, out=")
            symmetric = zcomm.empty(world * n, dtype=dtype)
            symmetric.copy_(inputs[rank])
            check_equal(zcomm.reduce_scatter(symmetric), want, f"{what}, symmetric")
    several = [make(world * n, torch.float32, rank, seed=n) for n in (3, 1024)]
    shards = zcomm.reduce_scatter(several, op="max")
    for n, shard in zip((3, 1024), shards, strict=True):
        full = expected([make(world * n, torch.float32, r, seed=n) for r in range(world)], "max")
        check_equal(shard, full[rank * n : (rank + 1) * n], f"list, max, {n}")


def all_gather_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for dtype in DTYPES:
        for n in (0, 1, 33, 100_001):
            shards = [make(n, dtype, r) for r in range(world)]
            want = torch.cat(shards)
            what = f"all_gather {dtype} {n}"
            check_equal(zcomm.all_gather(shards[rank].clone()), want, what)
            out = zcomm.empty(world * n, dtype=dtype)
            mine = out[rank * n : (rank + 1) * n]
            mine.copy_(shards[rank])
            assert zcomm.all_gather(mine, out=out).data_ptr() == out.data_ptr()
            check_equal(out, want, f"{what}, in place on the symmetric heap")


def broadcast_values() -> None:
    rank, world = zcomm.rank(), zcomm.world_size()
    for root in range(world):
        for count in COUNTS:
            tensor = make(count, torch.bfloat16, rank, seed=root)
            zcomm.broadcast(tensor, root=root)
            check_equal(tensor, make(count, torch.bfloat16, root, seed=root), f"broadcast from {root}, {count}")
    pair = [torch.full((3,), rank), torch.full((2, 2), 10 * rank)]
    zcomm.broadcast(pair, root=world - 1)
    assert pair[0].tolist() == [world - 1] * 3 and pair[1].tolist() == [[10 * (world - 1)] * 2] * 2


def bools() -> None:
    """Sum and max are or, prod and min are and; copies keep the values."""
    rank, world = zcomm.rank(), zcomm.world_size()
    inputs = [make(301, torch.int64, r) > 1 for r in range(world)]
    stack = torch.stack(inputs)
    for op, want in {"sum": stack.any(0), "max": stack.any(0), "prod": stack.all(0), "min": stack.all(0)}.items():
        tensor = inputs[rank].clone()
        zcomm.all_reduce(tensor, op)
        check_equal(tensor, want, f"bool {op}")
        tensor = inputs[rank].clone()
        zcomm.reduce(tensor, world - 1, op)
        check_equal(tensor, want if rank == world - 1 else inputs[rank], f"bool reduce {op}")
    check_equal(zcomm.all_gather(inputs[rank]), torch.cat(inputs), "bool all_gather")


def async_works() -> None:
    """Works of several pending operations: waited for in any order, polled, dropped."""
    rank, world = zcomm.rank(), zcomm.world_size()
    tensors = [make(50_000, torch.float32, rank, seed=i) for i in range(6)]
    works = [zcomm.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
        assert work.done()
        work.wait()  # a second wait does nothing
    for i, tensor in enumerate(tensors):
        check_equal(
            tensor, expected([make(50_000, torch.float32, r, seed=i) for r in range(world)], "sum"), f"work {i}"
        )
    shard, work = zcomm.reduce_scatter(torch.ones(4 * world), async_op=True)
    full, work_2 = zcomm.all_gather(torch.full((3,), float(rank)), async_op=True)
    work.wait(timeout=60)
    work_2.wait(timeout=60)
    assert shard.tolist() == [world] * 4
    assert full.tolist() == [float(r) for r in range(world) for _ in range(3)]
    got, work = zcomm.gather(torch.full((2,), float(rank)), async_op=True)
    part = torch.empty(1)
    work_2 = zcomm.scatter(part, torch.arange(float(world)) if rank == 0 else None, async_op=True)
    swapped = torch.empty(world)
    work_3 = zcomm.all_to_all(swapped, torch.full((world,), float(rank)), async_op=True)
    summed = torch.ones(3)
    zcomm.reduce(summed, async_op=True).wait()
    assert summed.tolist() == [world if rank == 0 else 1] * 3
    for pending in (work_3, work_2, work):
        pending.wait(timeout=60)
    assert got is None if rank else got.tolist() == [float(r) for r in range(world) for _ in range(2)]
    assert part.tolist() == [rank] and swapped.tolist() == list(range(world))
    dropped = torch.ones(100_000)
    zcomm.all_reduce(dropped, async_op=True)  # dropping the Work waits
    assert dropped.eq(world).all()
    zcomm.barrier()


def bad_arguments() -> None:
    """Raise on this rank before any message is sent; the communicator stays usable."""
    world = zcomm.world_size()
    if world > 1:
        with pytest.raises(ValueError, match=rf"{2 * world + 1}\b.*\b{world}\b"):
            zcomm.reduce_scatter(torch.ones(2 * world + 1))
    with pytest.raises(ValueError, match="contiguous"):
        zcomm.all_reduce(torch.ones(4, 4).t())
    with pytest.raises(ValueError, match="complex64"):
        zcomm.all_reduce(torch.ones(4, dtype=torch.complex64))
    with pytest.raises(ValueError, match="median"):
        zcomm.all_reduce(torch.ones(4), op="median")
    with pytest.raises(ValueError, match=str(world + 5)):
        zcomm.broadcast(torch.ones(4), root=world + 5)
    with pytest.raises(ValueError):
        zcomm.all_gather(torch.ones(4), out=torch.ones(4 * world + 1))
    with pytest.raises(ValueError):
        zcomm.all_reduce([])
    good = torch.ones(3)
    zcomm.all_reduce(good)
    assert good.tolist() == [world] * 3


def singleton() -> None:
    comm = zcomm.init()
    assert zcomm.init() is comm
    assert zcomm.is_initialized() and comm.rank == zcomm.rank() and comm.world_size == zcomm.world_size()
    assert 0 <= zcomm.local_rank() < zcomm.world_size()
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    assert tensor.tolist() == [zcomm.world_size()] * 3
    comm.reduce(tensor, root=0, op="max")
    got = comm.gather(tensor)
    assert got is None if comm.rank else got.tolist() == [comm.world_size] * 3 * comm.world_size
    comm.scatter(tensor, got)
    swapped = torch.empty(comm.world_size)
    comm.all_to_all(swapped, torch.full((comm.world_size,), float(comm.rank)))
    assert swapped.tolist() == list(range(comm.world_size))


VALUES: list[Callable[[], None]] = [
    singleton,
    all_reduce_values,
    all_reduce_rank_order,
    list_is_one_operation,
    one_tensor_in_many_guises,
    reduce_scatter_values,
    all_gather_values,
    broadcast_values,
    bools,
    async_works,
    bad_arguments,
]


@pytest.mark.parametrize("check", VALUES, ids=lambda check: check.__name__)
def test_world_1(check: Callable[[], None], world_of_one: None) -> None:
    assert zcomm.world_size() == 1
    check()


def all_values() -> list[str]:
    return failures_of(VALUES)


@pytest.mark.parametrize("world_size", [slow(2), 3])
def test_values(world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(all_values, world_size) == [[]] * world_size


# ---- arguments, in a world of one ----
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather", "gather"])
def test_what_is_not_a_tensor_is_named(call: str, world_of_one: None) -> None:
    operation = getattr(zcomm, call)
    with pytest.raises(TypeError, match=f"^{call}: pass a tensor or a list of tensors, got float$"):
        operation(3.0)
    with pytest.raises(TypeError, match=f"^{call}: pass a tensor or a list of tensors, element 1 is float$"):
        operation([torch.ones(1), 2.0])
    with pytest.raises(TypeError, match=f"^{call}: .*got str"):
        operation("weights")


def test_reductions_of_torch_and_near_misses(world_of_one: None) -> None:
    reduce_op = torch.distributed.ReduceOp
    for op in (reduce_op.SUM, reduce_op.AVG, reduce_op.PRODUCT, reduce_op.MIN, reduce_op(reduce_op.MAX)):
        value = torch.ones(2)
        zcomm.all_reduce(value, op=op)
        assert value.tolist() == [1.0, 1.0]
    for wrong, meant in (("mean", "avg"), ("SUM", "sum"), ("maximum", "max"), ("avgg", "avg")):
        with pytest.raises(ValueError, match=f"use one of sum, .*; did you mean '{meant}'\\?"):
            zcomm.all_reduce(torch.ones(1), op=wrong)
    with pytest.raises(ValueError, match="is not a reduction"):
        zcomm.all_reduce(torch.ones(1), op=reduce_op.BAND)


def test_empty_takes_a_shape_as_torchs(world_of_one: None) -> None:
    for made, shape in (
        (zcomm.empty(6), (6,)),
        (zcomm.empty(2, 3), (2, 3)),
        (zcomm.empty((2, 3)), (2, 3)),
        (zcomm.empty(torch.Size([2, 0])), (2, 0)),
        (zcomm.empty(), ()),
        (zcomm.empty(n=6), (6,)),
    ):
        assert made.shape == shape and made.dtype == torch.float32 and made.is_contiguous() and not made.any()
    for made in (zcomm.empty(6, torch.float16, "cpu"), zcomm.empty(6, dtype=torch.float16, device="cpu")):
        assert made.shape == (6,) and made.dtype == torch.float16
    with pytest.raises(ValueError, match="n=-1 is negative"):
        zcomm.empty(2, -1)
    with pytest.raises(ValueError, match=r"empty: 2\.5 is not an integer"):
        zcomm.empty(2.5)  # type: ignore[call-overload]


def test_names_by_position_are_still_taken(world_of_one: None) -> None:
    comm = zcomm.init()
    value = torch.ones(1)
    comm.all_reduce(value, "sum", False, "a name")  # type: ignore[call-overload]
    comm.reduce(value, 0, "sum", False, "a name")  # type: ignore[call-overload]
    comm.broadcast(value, 0, False, "a name")  # type: ignore[call-overload]
    comm.barrier("a name")  # type: ignore[call-overload]
    work = comm.barrier("a name", True)  # type: ignore[call-overload]
    work.wait()
    with pytest.raises(TypeError, match="name= is given by keyword"):
        comm.all_reduce(value, "sum", False, "a name", 3)  # type: ignore[call-overload]


def test_a_communicator_shows_itself(world_of_one: None) -> None:
    assert repr(zcomm.init()) == "<zcomm.Communicator: rank 0 of 1 rank on 1 host, backend shm>"
