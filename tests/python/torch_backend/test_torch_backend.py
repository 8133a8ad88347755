"""torch.distributed over "zcomm": every operation against torch's results for all ranks' inputs.

One world runs many checks, in sizes 1 (its own process), 2 and 3.
"""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tasks import tasks
from tiers import slow
from torch_world import make, world
from zcomm.torch_backend.completer import Completer
from zcomm.torch_backend.work import Flight, Pending

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
NATIVE = [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64]
MOVED = [*NATIVE, torch.bool, torch.int16, torch.uint16, torch.complex64, torch.complex128, torch.float8_e4m3fn]


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    stack = torch.stack([t.to(torch.complex128 if t.is_complex() else torch.float64) for t in inputs])
    result = {
        "SUM": lambda: stack.sum(0),
        "AVG": lambda: stack.sum(0) / len(inputs),
        "PRODUCT": lambda: stack.prod(0),
        "MIN": lambda: stack.amin(0),
        "MAX": lambda: stack.amax(0),
        "BAND": lambda: functools.reduce(torch.bitwise_and, inputs),
        "BOR": lambda: functools.reduce(torch.bitwise_or, inputs),
        "BXOR": lambda: functools.reduce(torch.bitwise_xor, inputs),
    }[op]()
    return result.to(inputs[0].dtype)


def same(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, f"{what}: {got.dtype} {got.shape}, expected {want}"
    tolerance = torch.finfo(got.dtype).eps * 2 if got.dtype.is_floating_point or got.is_complex() else 0
    if got.dtype == torch.float8_e4m3fn:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=0, msg=lambda m: f"{what}: {m}")


# ---- reductions ----
def all_reduce_values(rank: int, size: int) -> None:
    cases = [(dtype, op) for dtype in NATIVE for op in ("SUM", "PRODUCT", "MIN", "MAX")]
    cases += [(dtype, "AVG") for dtype in FLOATS]
    cases += [(dtype, op) for dtype in (torch.int32, torch.uint8, torch.bool) for op in ("BAND", "BOR", "BXOR")]
    cases += [(torch.int16, "SUM"), (torch.int16, "MAX"), (torch.bool, "MAX"), (torch.bool, "MIN")]
    for complex_dtype in (torch.complex64, torch.complex128):
        cases += [(complex_dtype, "SUM"), (complex_dtype, "AVG")]
    for dtype, op in cases:
        for shape in ((), (0,), (7,), (3, 5), (40_001,)):
            inputs = [make(r, *shape, dtype=dtype) for r in range(size)]
            if dtype.is_complex:
                inputs = [t + 1j * t for t in inputs]
            tensor = inputs[rank].clone()
            assert dist.all_reduce(tensor, getattr(dist.ReduceOp, op)) is None
            same(tensor, reduced(inputs, op), f"all_reduce {op} {dtype} {shape}")
    extremes = [5, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 0]  # in signed order the largest come first
    unsigned = [[extremes[(r + n) % len(extremes)] for n in range(len(extremes))] for r in range(size)]
    for kind, of in (("MIN", min), ("MAX", max), ("SUM", lambda row: sum(row) % 2**64)):
        tensor, part = torch.tensor(unsigned[rank], dtype=torch.uint64), torch.empty(6, dtype=torch.uint64)
        dist.reduce_scatter(part, [tensor] * size, getattr(dist.ReduceOp, kind))
        dist.all_reduce(tensor, getattr(dist.ReduceOp, kind))
        want = [of(column) for column in zip(*unsigned, strict=True)]
        assert tensor.tolist() == part.tolist() == want, f"{kind} of uint64"
    tensor = make(rank, 5)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor and work.get_future().wait()[0] is tensor
    same(tensor, reduced([make(r, 5) for r in range(size)], "SUM"), "asynchronous")
    tensor = make(rank, 6)
    dist.all_reduce(tensor, op=dist._make_nccl_premul_sum(0.5))
    same(tensor, reduced([make(r, 6) for r in range(size)], "SUM") * 0.5, "PREMUL_SUM")


def strange_tensors(rank: int, size: int) -> None:
    """Test strided, expanded, conjugated, channels-last tensors, and leaves that require gradients."""
    whole = make(rank, 6, 8)
    want = whole.clone()
    want[::2, 1::3] = reduced([make(r, 6, 8)[::2, 1::3] for r in range(size)], "SUM")
    for asynchronous in (False, True):
        tensor = whole.clone()
        work = dist.all_reduce(tensor[::2, 1::3], async_op=asynchronous)
        if work is not None:
            work.wait()
        same(tensor, want, f"strided view, async {asynchronous}")
    image = make(rank, 2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(image)
    assert image.is_contiguous(memory_format=torch.channels_last)
    same(image.contiguous(), reduced([make(r, 2, 3, 4, 5) for r in range(size)], "SUM"), "channels last")
    leaf = torch.nn.Parameter(make(rank, 4).t())
    dist.broadcast(leaf, 0)
    same(leaf.detach(), make(0, 4), "a parameter")
    outputs = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.all_gather(outputs, make(rank, 4, 3).t())
    for r, output in enumerate(outputs):
        same(output.contiguous(), make(r, 4, 3).t().contiguous(), "all_gather of transposed tensors")
    spiral = make(rank, 3).to(torch.complex64) * (1 + 2j)
    gathered = torch.zeros(3 * size, dtype=torch.complex64)
    dist.group.WORLD._allgather_base(gathered, spiral.conj()).wait()
    want = torch.cat([(make(r, 3).to(torch.complex64) * (1 + 2j)).conj().resolve_conj() for r in range(size)])
    same(gathered, want, "conjugated view")


def sparse_all_reduce(rank: int, size: int) -> None:
    def of(r: int) -> torch.Tensor:
        return torch.sparse_coo_tensor([[r, r + 1, r]], torch.arange(6.0).view(3, 2) + r, (size + 2, 2))

    tensor = of(rank)
    dist.all_reduce(tensor)
    want = sum(of(r).to_dense() for r in range(size))
    same(tensor.to_dense(), want, "sparse")  # type: ignore[arg-type]


def reduce_values(rank: int, size: int) -> None:
    for root in range(size):
        for dtype, op in ((torch.float32, "SUM"), (torch.int64, "MAX"), (torch.int16, "SUM"), (torch.int32, "BXOR")):
            inputs = [make(r, 17, dtype=dtype, seed=root) for r in range(size)]
            tensor = inputs[rank].clone()
            dist.reduce(tensor, root, getattr(dist.ReduceOp, op))
            same(tensor, reduced(inputs, op) if rank == root else inputs[rank], f"reduce {op} {dtype} to {root}")


def reduce_scatter_values(rank: int, size: int) -> None:
    for dtype, op in ((torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int64, "MIN"), (torch.int16, "SUM")):
        for n in (0, 1, 33):
            inputs = [make(r, size * n, dtype=dtype) for r in range(size)]
            want = reduced(inputs, op)[rank * n : (rank + 1) * n]
            output = torch.empty(n, dtype=dtype)
            dist.reduce_scatter_tensor(output, inputs[rank].clone(), getattr(dist.ReduceOp, op))
            same(output, want, f"reduce_scatter_tensor {op} {dtype} {n}")
            output = torch.empty(n, dtype=dtype)
            chunks = [chunk.clone() for chunk in inputs[rank].split(n)] if n else [torch.empty(0, dtype=dtype)] * size
            dist.reduce_scatter(output, chunks, getattr(dist.ReduceOp, op))
            same(output, want, f"reduce_scatter of a list, {op} {dtype} {n}")
    output = torch.empty(rank + 1)
    dist.reduce_scatter(output, [make(rank, r + 1, seed=r) for r in range(size)])
    same(output, reduced([make(r, rank + 1, seed=rank) for r in range(size)], "SUM"), "chunks of different sizes")


# ---- movements ----
def gathers(rank: int, size: int) -> None:
    for dtype in MOVED:
        for n in (0, 1, 1001):
            inputs = [make(r, n, dtype=dtype) for r in range(size)]
            flat = torch.zeros(size * n, dtype=dtype)
            dist.all_gather_into_tensor(flat, inputs[rank])
            same(flat, torch.cat(inputs), f"all_gather_into_tensor {dtype} {n}")
            outputs = [torch.zeros(n, dtype=dtype) for _ in range(size)]
            dist.all_gather(outputs, inputs[rank])
            for r in range(size):
                same(outputs[r], inputs[r], f"all_gather {dtype} {n}")
            root = n % size
            outputs = [torch.zeros(n, dtype=dtype) for _ in range(size)]
            dist.gather(inputs[rank], outputs if rank == root else None, dst=root)
            for r in range(size):
                same(outputs[r], inputs[r] if rank == root else torch.zeros(n, dtype=dtype), f"gather {dtype} {n}")
            output = torch.zeros(n, dtype=dtype)
            dist.scatter(output, [make(r, n, dtype=dtype, seed=5) for r in range(size)] if rank == root else None, root)
            same(output, make(rank, n, dtype=dtype, seed=5), f"scatter {dtype} {n}")
            tensor = make(rank, n, dtype=dtype)
            dist.broadcast(tensor, root)
            same(tensor, make(root, n, dtype=dtype), f"broadcast {dtype} {n}")
    flat = torch.zeros(size, 3)
    dist.all_gather(list(flat.unbind(0)), make(rank, 3))  # chunks of one tensor: written in place
    same(flat, torch.stack([make(r, 3) for r in range(size)]), "all_gather into chunks")
    outputs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outputs, make(rank, rank + 1))
    for r in range(size):
        same(outputs[r], make(r, r + 1), "all_gather of different sizes")


def all_to_alls(rank: int, size: int) -> None:
    for dtype in MOVED:
        inputs = [[make(a, b + 2 * a, dtype=dtype, seed=b) for b in range(size)] for a in range(size)]
        outputs = [torch.zeros(rank + 2 * r, dtype=dtype) for r in range(size)]
        dist.all_to_all(outputs, inputs[rank])
        for r in range(size):
            same(outputs[r], inputs[r][rank], f"all_to_all {dtype} from {r}")
    source = make(rank, 2 * size, 3)
    output = torch.empty_like(source)
    dist.all_to_all_single(output, source)
    same(output, torch.cat([make(r, 2 * size, 3)[2 * rank : 2 * rank + 2] for r in range(size)]), "equal splits")
    splits = [[(a + b) % 3 for b in range(size)] for a in range(size)]
    source = make(rank, sum(splits[rank]), 2)
    output = torch.empty(sum(row[rank] for row in splits), 2)
    dist.all_to_all_single(output, source, [row[rank] for row in splits], splits[rank])
    want = [make(r, sum(splits[r]), 2).split(splits[r])[rank] for r in range(size)]
    same(output, torch.cat(want), "unequal splits")


def coalesced(rank: int, size: int) -> None:
    tensors = [make(rank, n, dtype=dtype) for n, dtype in ((3, torch.float32), (5, torch.int64), (0, torch.float32))]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        same(tensor, reduced([make(r, *tensor.shape, dtype=tensor.dtype) for r in range(size)], "SUM"), "all_reduce")
    outputs = [torch.zeros(size * n) for n in (2, 4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for n, output in zip((2, 4), outputs, strict=True):
            dist.all_gather_into_tensor(output, make(rank, n))
    manager.wait()
    for n, output in zip((2, 4), outputs, strict=True):
        same(output, torch.cat([make(r, n) for r in range(size)]), "all_gather")
    outputs = [torch.zeros(n) for n in (2, 4)]
    with dist._coalescing_manager():
        for n, output in zip((2, 4), outputs, strict=True):
            dist.reduce_scatter_tensor(output, make(rank, n * size))
    for n, output in zip((2, 4), outputs, strict=True):
        want = reduced([make(r, n * size) for r in range(size)], "SUM")
        same(output, want[rank * n : (rank + 1) * n], "reduce_scatter")
    tensors = [make(rank, 3, seed=i) for i in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0, async_op=True)
    manager.wait()
    for i, tensor in enumerate(tensors):
        same(tensor, make(0, 3, seed=i), "broadcast")


def objects(rank: int, size: int) -> None:
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * 1000 * rank})
    assert gathered == [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "a"), collected, dst=0)
    assert collected == ([(r, "a") for r in range(size)] if rank == 0 else None)
    told = [{"from": rank}, rank]
    dist.broadcast_object_list(told, src=size - 1)
    assert told == [{"from": size - 1}, size - 1]
    dealt: list[Any] = [None]
    dist.scatter_object_list(dealt, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert dealt == [f"for {rank}"]


def barriers(rank: int, size: int) -> None:
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)


def groups(rank: int, size: int) -> None:
    evens = dist.new_group(list(range(0, size, 2)))
    alone = dist.new_group([rank], use_local_synchronization=True)
    if rank % 2 == 0:
        tensor = make(rank, 4)
        dist.all_reduce(tensor, group=evens)
        same(tensor, reduced([make(r, 4) for r in range(0, size, 2)], "SUM"), "group of even ranks")
        assert dist.get_world_size(evens) == len(range(0, size, 2)) and dist.get_group_rank(evens, rank) == rank // 2
    tensor = make(rank, 4)
    dist.all_reduce(tensor, group=alone)
    same(tensor, make(rank, 4), "group of one")
    part = dist.group.WORLD.split_group(list(range(size - 1, -1, -1)), group_name="turned")
    tensor = torch.full((1,), float(part.rank()))
    part.broadcast(tensor, root=0).wait()
    assert part.rank() == size - 1 - rank and tensor.item() == 0
    part.shutdown()
    dist.destroy_process_group(alone)
    assert dist.get_backend() == "zcomm" and dist.group.WORLD.name() == "zcomm"


def refusals(rank: int, size: int) -> None:
    """Raise on this rank before any message is sent; the group stays usable."""
    with pytest.raises(ValueError, match=f"{3 * size + 1} elements"):
        dist.all_gather_into_tensor(torch.empty(3 * size + 1), torch.empty(3))
    with pytest.raises(ValueError, match="BXOR"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)
    with pytest.raises(ValueError, match="integers have no average"):
        dist.all_reduce(torch.ones(2, dtype=torch.int32), dist.ReduceOp.AVG)
    for dtype in (torch.uint4, torch.bits8):  # dtypes without arithmetic
        part, whole = (torch.zeros(count, dtype=torch.uint8).view(dtype) for count in (2, 2 * size))
        for refused in (
            lambda part=part: dist.all_reduce(part, dist.ReduceOp.MAX),
            lambda part=part, whole=whole: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX),
        ):
            with pytest.raises(NotImplementedError, match=rf"MAX of {dtype}: torch has no such operation on cpu"):
                refused()
    with pytest.raises(NotImplementedError, match="meta"):
        dist.all_reduce(torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="cuda"):
        dist.group.WORLD._get_backend(torch.device("cuda"))
    tensor = make(rank, 2)
    dist.all_reduce(tensor)
    same(tensor, reduced([make(r, 2) for r in range(size)], "SUM"), "after refusals")


def dropped_works(rank: int, size: int) -> None:
    """Drop Works: a program need not keep them, and completed works keep no tensor."""
    tensors = [make(rank, 100, seed=i) for i in range(50)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    for i, tensor in enumerate(tensors):
        same(tensor, reduced([make(r, 100, seed=i) for r in range(size)], "SUM"), "dropped work")


CHECKS: dict[str, Callable[[int, int], None]] = {
    check.__name__: check
    for check in (
        all_reduce_values,
        strange_tensors,
        sparse_all_reduce,
        reduce_values,
        reduce_scatter_values,
        gathers,
        all_to_alls,
        coalesced,
        objects,
        barriers,
        groups,
        refusals,
        dropped_works,
    )
}


def _values() -> None:
    with world() as (rank, size):
        for check in CHECKS.values():
            check(rank, size)


@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3)])
def test_values(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    run_ranks(_values, world_size)


# ---- messages ----
def _messages() -> None:
    with world() as (rank, size):
        after, before = (rank + 1) % size, (rank - 1) % size
        for dtype in MOVED:
            for n in (0, 1, 200_000):
                output = torch.zeros(n, dtype=dtype)
                request = dist.isend(make(rank, n, dtype=dtype), after)
                assert dist.recv(output, before) == before
                request.wait()
                same(output, make(before, n, dtype=dtype), f"recv {dtype} {n}")
        if rank == 0:  # tags, out of order
            requests = [dist.isend(torch.full((2,), float(tag)), 1, tag=tag) for tag in (7, 8)]
            for request in requests:
                request.wait()
        elif rank == 1:
            for tag in (8, 7):
                output = torch.zeros(2)
                dist.recv(output, 0, tag=tag)
                assert output.tolist() == [tag, tag]
        if rank == 0:  # from any source
            sources = []
            for _ in range(size - 1):
                output = torch.zeros(1)
                source = dist.recv(output, tag=3)
                assert output.item() == source
                sources.append(source)
            assert sorted(sources) == list(range(1, size))
        else:
            dist.send(torch.full((1,), float(rank)), 0, tag=3)
        incoming, outgoing = torch.zeros(4, 2).t(), make(rank, 4, 2).t()
        operations = [dist.P2POp(dist.irecv, incoming, before), dist.P2POp(dist.isend, outgoing, after)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        same(incoming.contiguous(), make(before, 4, 2).t().contiguous(), "batch of strided tensors")
        told: list[Any] = [None]
        if rank == 0:
            dist.send_object_list([{"a": 1}], 1)
        elif rank == 1:
            dist.recv_object_list(told, 0)
            assert told == [{"a": 1}]
        future = dist.irecv(output := torch.zeros(3), before).get_future()
        dist.send(make(rank, 3), after)
        assert future.wait()[0] is output
        same(output, make(before, 3), "a message's Future")


@pytest.mark.parametrize("world_size", [2, 3])
def test_messages(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    run_ranks(_messages, world_size)


# ---- life ----
def _descriptors() -> None:
    counts = []
    for _ in range(4):
        with world():
            group = dist.new_group()
            dist.all_reduce(torch.ones(10), group=group)
            dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
        del group
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), tasks(counts[1][1] if len(counts) == 3 else None)))
    assert counts[1][0] == counts[3][0] and counts[1][1] >= counts[3][1], counts


def test_a_destroyed_group_leaves_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_descriptors, 2)


class _EndsAsWaitingStops:
    """A core's work that ends between a wait's timeout and the check whether it is done."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._ended = False

    def wait(self, timeout: float | None = None) -> None:
        if not self._ended:
            self._ended = True
            raise TimeoutError("not done yet")
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._ended


@pytest.mark.parametrize("error", [None, TimeoutError("its own deadline"), ValueError("its own")])
def test_one_that_ends_as_waiting_stops_has_its_own_outcome(error: Exception | None) -> None:
    work = Pending(_EndsAsWaitingStops(error), [torch.zeros(1)], Completer(any_order=True), Flight())
    if error is None:
        assert work.wait(timedelta(milliseconds=1))
    else:
        with pytest.raises(type(error), match=str(error)):
            work.wait(timedelta(milliseconds=1))
