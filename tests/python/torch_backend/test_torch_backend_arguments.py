"""Unusual arguments of torch.distributed calls: each gives the right result, or its error names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from torch_world import world


def lists_for_several_devices(rank: int, size: int) -> None:
    """Pass lists of one tensor for each device of a process: the error names the call that accepts several."""
    group = dist.group.WORLD
    pair = [torch.ones(2), torch.ones(3)]
    options = dist.BroadcastOptions()
    options.rootTensor = 1
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: group.allreduce(pair), "all_reduce: a list of 2 tensors.*allreduce_coalesced"),
        (lambda: group.allreduce([]), "all_reduce: a list of 0 tensors"),
        (lambda: group.broadcast(pair, 0), "broadcast: a list of 2 tensors.*each"),
        (lambda: group.reduce(pair, 0), "reduce: a list of 2 tensors"),
        (lambda: group.broadcast(pair[:1], options), "rootTensor=1"),
        (lambda: group.allgather([[torch.ones(2)] * size] * 2, pair), "all_gather: a list of 2 .*_coalesced"),
        (lambda: group.reduce_scatter(pair, [pair * size] * 2), "reduce_scatter: a list of 2 .*_coalesced"),
        (lambda: group.gather([], pair, root=size - 1), "gather: a list of 2"),
        (lambda: group.scatter(pair, [], root=size - 1), "scatter: a list of 2"),
    ]
    for call, text in refused:
        with pytest.raises(ValueError, match=text):
            call()
    group.allreduce_coalesced(pair).wait()
    assert [t.tolist() for t in pair] == [[size] * 2, [size] * 3]
    group.allreduce(pair[:1]).wait()
    assert pair[0].tolist() == [size * size] * 2


def splits_of_any_integers(rank: int, size: int) -> None:
    inputs, wanted = (
        torch.arange(2.0 * size) + 100 * rank,
        [100.0 * r + 2 * rank + k for r in range(size) for k in (0, 1)],
    )
    for splits in (
        np.full(size, 2),
        np.full(size, 2, dtype=np.uint8),
        torch.full((size,), 2),
        [np.int64(2)] * size,
        (2,) * size,
    ):
        outputs = torch.zeros(2 * size)
        dist.all_to_all_single(outputs, inputs, splits, splits)
        assert outputs.tolist() == wanted, splits
        dist.all_to_all_single(outputs.zero_(), inputs, splits)
        assert outputs.tolist() == wanted, splits
    with pytest.raises(ValueError, match=r"output splits.*2\.0.* not an integer"):
        dist.all_to_all_single(torch.zeros(2 * size), inputs, np.full(size, 2.0), None)
    with pytest.raises(ValueError, match="input splits"):
        dist.all_to_all_single(torch.zeros(2 * size), inputs, None, np.full(size, 3))


def inference_tensors(rank: int, size: int) -> None:
    """Test tensors from inference mode: dense and strided, each way to call and wait, inside and outside the mode."""
    waits: dict[str, Callable[[Any], Any]] = {
        "wait": lambda work: work.wait(),
        "future": lambda work: work.get_future().wait(),
        "callback": lambda work: work.get_future().then(lambda own: own.value()).wait(),
        "barrier": lambda work: dist.barrier(),
    }
    operations = (dist.ReduceOp.SUM, dist.ReduceOp.BOR)
    for within in (False, True):
        for dense in (True, False):
            for op in operations:
                for how, wait in waits.items():
                    with torch.inference_mode():
                        tensor = torch.full((4, 6), 1 << rank, dtype=torch.int64)
                        tensor = tensor if dense else tensor.t()[::2]
                    with torch.inference_mode(within):
                        wait(dist.all_reduce(tensor, op, async_op=True))
                        assert bool((tensor == (1 << size) - 1).all()), (within, dense, op, how)
                        dist.all_reduce(tensor, op)
                        outputs = [torch.zeros_like(tensor) for _ in range(size)]
                        wait(dist.all_gather(outputs, tensor, async_op=True))
                        assert all(torch.equal(output, tensor) for output in outputs), (within, dense, op, how)
    with torch.inference_mode():
        tensor = torch.ones(4, 4).t()[::2]
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert bool((tensor == size * 0.5).all())


def expanded_tensors(rank: int, size: int) -> None:
    """Pass tensors with one memory location for several elements: they are read, but never written to."""
    row = torch.full((3,), rank + 1.0)
    expanded = row.expand(2, 3)
    outputs = [torch.zeros(2, 3) for _ in range(size)]
    dist.all_gather(outputs, expanded)
    assert [output[1, 2].item() for output in outputs] == [r + 1.0 for r in range(size)]
    target = expanded if rank == 0 else torch.zeros(2, 3)
    dist.broadcast(target, 0)
    assert target.tolist() == [[1.0] * 3] * 2
    column = torch.ones(1).expand(5)
    refused: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(expanded),
        lambda: dist.all_reduce(column, async_op=True),
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int16).expand(5), dist.ReduceOp.BOR),
        lambda: dist.group.WORLD.allreduce_coalesced([torch.ones(2), expanded]),
        lambda: dist.all_gather([expanded] + [torch.zeros(2, 3)] * (size - 1), torch.ones(2, 3)),
        lambda: dist.broadcast(expanded, (rank + 1) % size) if size > 1 else dist.all_reduce(expanded),
        lambda: dist.reduce(expanded, rank),
        lambda: dist.reduce_scatter_tensor(expanded, torch.ones(2 * size, 3)),
        lambda: dist.irecv(expanded, (rank + 1) % size) if size > 1 else dist.all_reduce(expanded),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"strides \((0, 1|0,)\).*single memory location.*clone"):
            call()
    assert bool((row == rank + 1).all())
    whole = torch.ones(8)
    dist.all_reduce(whole[:1].expand(1))  # one element has its own location
    assert whole.tolist() == [size] + [1.0] * 7


def results_at_one_place(rank: int, size: int) -> None:
    if size == 1:
        return
    one = torch.zeros(5)
    for outputs in ([one[:4]] * size, [one[:4], one[1:], torch.zeros(4)][:size]):
        with pytest.raises(ValueError, match=r"all_gather: outputs 0 and 1 lie at one place.*0x"):
            dist.all_gather(outputs, torch.ones(4))
    with pytest.raises(ValueError, match="lie at one place"):
        dist.all_gather([one[:4].view(2, 2).t()] * size, torch.ones(2, 2))
    meshed = torch.zeros(3, size)
    dist.all_gather([meshed[:, r] for r in range(size)], torch.full((3,), float(rank)))
    assert meshed.tolist() == [[float(r) for r in range(size)]] * 3


def neighbours_of_several_storages(rank: int, size: int) -> None:
    """Pass lists of tensors that are adjacent in memory, but have their own storages."""
    memory = bytearray(256 * size)

    def row() -> list[torch.Tensor]:
        return [torch.frombuffer(memory, dtype=torch.float32, count=64, offset=256 * r) for r in range(size)]

    dist.all_gather(row(), torch.full((64,), rank + 1.0))
    assert [tensor.unique().tolist() for tensor in row()] == [[r + 1.0] for r in range(size)]
    own = torch.empty(64)
    dist.reduce_scatter(own, row())
    assert own.unique().tolist() == [size * (rank + 1.0)]
    dist.gather(torch.full((64,), rank + 5.0), row() if rank == 0 else None, 0)
    if rank == 0:
        assert [tensor.unique().tolist() for tensor in row()] == [[r + 5.0] for r in range(size)]
    dist.scatter(own, row() if rank == 0 else None, 0)
    assert own.unique().tolist() == [rank + 5.0]


def buffers_that_share_memory(rank: int, size: int) -> None:
    """Operate in place, as torch's backends allow; any other overlap is refused."""
    for n in (3, 70_000):
        whole = torch.zeros(size, n)
        whole[rank] = rank + 1
        dist.all_gather_into_tensor(whole, whole[rank])
        assert whole[:, -1].tolist() == [r + 1 for r in range(size)]
        dist.reduce_scatter_tensor(whole[rank], whole)
        assert whole[rank].unique().tolist() == [size * (rank + 1)]
        dist.all_gather(list(whole), whole[rank])
        assert whole[:, -1].tolist() == [size * (r + 1) for r in range(size)]
        other = whole[(rank + 1) % size]
        if size == 1:
            continue
        for call in (
            lambda whole=whole, other=other: dist.all_gather_into_tensor(whole, other),
            lambda whole=whole, other=other: dist.reduce_scatter_tensor(other, whole),
            lambda whole=whole: dist.all_to_all_single(whole, whole),
            lambda whole=whole: dist.all_to_all(list(whole), list(whole)),
        ):
            with pytest.raises(ValueError, match=r"0x[0-9a-f]+, .*0x[0-9a-f]+, .*overlap"):
                call()
        with pytest.raises(ValueError, match=r"recv.*0x.*overlap"):
            dist.group.WORLD.recv([whole[0], whole[0]], (rank + 1) % size, 0)


def graphs_of_what_is_written(rank: int, size: int) -> None:
    """Backward of a graph raises if a collective has written to one of its tensors; a root only sends."""

    def pieces(t: torch.Tensor) -> list[torch.Tensor]:
        return list(t.chunk(size))

    writers: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "all_reduce async": lambda t: dist.all_reduce(t, async_op=True).wait(),
        "all_reduce of bytes": lambda t: dist.all_reduce(t, dist.ReduceOp.PRODUCT),
        "all_gather": lambda t: dist.all_gather_into_tensor(t, torch.ones(2)),
        "all_gather list": lambda t: dist.all_gather(pieces(t), torch.ones(2)),
        "all_to_all": lambda t: dist.all_to_all_single(t, torch.ones(2 * size)),
        "reduce_scatter": lambda t: dist.reduce_scatter_tensor(t, torch.ones(2 * size * size)),
        "scatter": lambda t: dist.scatter(t, [torch.ones(2 * size)] * size if rank == 0 else None, 0),
        "broadcast": lambda t: dist.broadcast(t, 0),
        "reduce": lambda t: dist.reduce(t, 0),
    }
    for name, write in writers.items():
        weight, x = torch.ones(2 * size, requires_grad=True), torch.ones(2 * size)
        loss = (weight * x).sum()
        write(x)
        if (name == "broadcast" and rank == 0) or (name == "reduce" and rank != 0):
            loss.backward()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def memory_that_was_freed(rank: int, size: int) -> None:
    """Refuse a storage that is smaller than its tensor, before any message is sent."""
    for refused in (torch.ones(4 * size), torch.ones(8 * size)[4 * size :]):
        refused.untyped_storage().resize_(4)
        calls: list[Callable[[], Any]] = [
            lambda t=refused: dist.all_reduce(t),  # type: ignore[misc]
            lambda t=refused: dist.broadcast(t, 0),  # type: ignore[misc]
            lambda t=refused: dist.all_gather_into_tensor(torch.ones(4 * size * size), t),  # type: ignore[misc]
            lambda t=refused: dist.reduce_scatter_tensor(torch.ones(4), t),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(ValueError, match="less memory than elements"):
                call()


CHECKS = (
    graphs_of_what_is_written,
    memory_that_was_freed,
    buffers_that_share_memory,
    lists_for_several_devices,
    splits_of_any_integers,
    inference_tensors,
    expanded_tensors,
    results_at_one_place,
    neighbours_of_several_storages,
)


def _job(names: list[str]) -> None:
    with world() as (rank, size):
        for check in CHECKS:
            if check.__name__ in names:
                check(rank, size)
        last = torch.ones(1)
        dist.all_reduce(last)
        assert last.item() == size


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_arguments(run_ranks: Callable[..., list[Any]], name: str) -> None:
    run_ranks(_job, 2, [name])


@pytest.mark.parametrize("world_size", [1, 3])
def test_arguments_in_other_worlds(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    run_ranks(_job, world_size, [check.__name__ for check in CHECKS])
