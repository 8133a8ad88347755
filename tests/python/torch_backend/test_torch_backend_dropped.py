"""Works that the program drops: copies back are complete when a later operation of the group has ended."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torch_world import world

COUNT = 40_000


def _strided(value: float) -> torch.Tensor:
    return torch.full((4, COUNT), value).t()[:, ::2]  # neither contiguous nor one block


def _calls(rank: int, size: int) -> dict[str, tuple[Callable[[torch.Tensor], Any], float]]:
    """Return a collective on a strided tensor of the rank's number + 1, and the value that it has at the end."""

    def gather(tensor: torch.Tensor) -> Any:
        outputs = [torch.empty_like(tensor) for _ in range(size)]
        outputs[0] = tensor
        return dist.all_gather(outputs, torch.full(tensor.shape, rank + 5.0), async_op=True)

    return {
        "all_reduce": (lambda t: dist.all_reduce(t, async_op=True), sum(range(1, size + 1))),
        "broadcast": (lambda t: dist.broadcast(t, 0, async_op=True), 1.0),
        "all_gather": (gather, 5.0),
        "bitwise": (lambda t: dist.all_reduce(t, dist.ReduceOp.BOR, async_op=True), 0.0),
    }


def _later(rank: int) -> dict[str, Callable[[], Any]]:
    one = torch.ones(3)
    return {
        "barrier": dist.barrier,
        "blocking": lambda: dist.all_reduce(one),
        "strided": lambda: dist.all_reduce(_strided(1.0)),
        "wait": lambda: dist.all_reduce(one, async_op=True).wait(),
        "future": lambda: dist.all_reduce(one, async_op=True).get_future().wait(),
        "callback": lambda: dist.all_reduce(one, async_op=True).get_future().then(lambda own: own.value()).wait(),
        "coalesced": _coalesced,
        "monitored": lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)),
    }


def _coalesced() -> None:
    with dist._coalescing_manager():
        for _ in range(2):
            dist.all_reduce(torch.ones(3))


def _dropped() -> None:
    with world() as (rank, size):
        for what, (call, want) in _calls(rank, size).items():
            for then, later in _later(rank).items():
                for late in range(2):
                    tensor = _strided(rank + 1.0)
                    if what == "bitwise":
                        tensor, want = tensor.to(torch.int64), 3
                    if rank == late:
                        time.sleep(0.01)
                    call(tensor)
                    later()
                    assert bool((tensor == want).all()), f"{what}, then {then}: {tensor[0, 0]}, expected {want}"
                    tensor.fill_(-7)  # the program's own write: no copy overwrites it
                    dist.barrier()
                    dist.all_reduce(torch.ones(1), async_op=True).wait()
                    assert bool((tensor == -7).all()), f"{what}, then {then}: a late copy"


def test_a_later_operation_finds_the_copy(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_dropped, 2)


def _dropped_many() -> None:
    """Drop more works than Python may nest calls; then wait for one, with another in flight after it."""
    with world() as (rank, size):
        tensors = [torch.full((2, 4), rank + 1.0).t() for _ in range(1500)]
        for tensor in tensors:
            dist.all_reduce(tensor, async_op=True)
        waited = dist.all_reduce(torch.ones(1), async_op=True)
        store = dist.distributed_c10d._get_default_store()
        behind = torch.ones(4, 2).t()
        if rank == 0:
            last = dist.all_reduce(behind, async_op=True)
            waited.wait()  # not for the one after it
            store.set("waited", "yes")
        else:
            waited.wait()
            store.wait(["waited"])
            last = dist.all_reduce(behind, async_op=True)
        assert all(bool((tensor == sum(range(1, size + 1))).all()) for tensor in tensors)
        last.wait()
        assert bool((behind == size).all())


def test_many_dropped_works(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_dropped_many, 2)


def _received() -> None:
    """Receive into a strided tensor: it is complete after its sender knows of the arrival and a collective."""
    with world() as (rank, _size):
        tensor = torch.zeros(3, 2).t()
        if rank == 0:
            dist.irecv(tensor, 1)
            dist.recv(torch.zeros(1), 1, tag=1)
        else:
            dist.send(torch.ones(2, 3), 0)
            dist.send(torch.zeros(1), 0, tag=1)
        for _ in range(100):
            dist.barrier()
            if rank != 0 or bool((tensor == 1).all()):
                continue
            time.sleep(0.01)
        assert rank != 0 or bool((tensor == 1).all())


def test_a_dropped_recv(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_received, 2)


@pytest.mark.parametrize("strided", [False, True])
def test_destroying_the_group_finishes_what_has_ended(run_ranks: Callable[..., list[Any]], strided: bool) -> None:
    run_ranks(_destroyed, 2, strided)


def _destroyed(strided: bool) -> None:
    with world() as (rank, size):
        tensor = _strided(rank + 1.0) if strided else torch.full((3,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        while not work._core.done():
            time.sleep(0.001)
        dist.distributed_c10d._get_default_store().add("ended", 1)
        while int(dist.distributed_c10d._get_default_store().add("ended", 0)) < size:
            time.sleep(0.001)
    assert bool((tensor == sum(range(1, size + 1))).all())


def _behind_a_callback() -> None:
    """Reduce a strided tensor that waits for a callback's return: collectives of the callback do not wait for it."""
    with world(timeout_s=30.0) as (rank, size):
        for late in range(size):
            strided = _strided(rank + 1.0)
            if rank == late:
                time.sleep(0.05)

            def callback(own: Any) -> float:
                time.sleep(0.05)
                tensor = torch.ones(1)
                dist.all_reduce(tensor)
                dist.all_reduce(tensor, async_op=True).wait()
                return float(tensor)

            told = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(callback)
            dist.all_reduce(strided, async_op=True)
            assert told.wait() == size * size
            dist.barrier()
            assert bool((strided == sum(range(1, size + 1))).all())


def test_a_dropped_work_behind_a_callback(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_behind_a_callback, 2)


def _left_to_cpp() -> None:
    """Hold works only by a C++ reference, before and after their end: they still end, and have a Future."""
    with world(timeout_s=30.0) as (rank, _size):
        plain, sparse = torch.ones(3), torch.eye(2).to_sparse()
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: dist.all_reduce(plain, async_op=True),
            "sparse": lambda: dist.all_reduce(sparse, async_op=True),
            "strided": lambda: dist.all_reduce(_strided(1.0), async_op=True),
            "message": lambda: dist.isend(plain, 1) if rank == 0 else dist.irecv(torch.zeros(3), 0),
            "empty": _empty_batch,
        }
        for what, call in calls.items():
            for has_ended in (False, True):
                work = call()
                if has_ended:
                    work.wait()
                held = work.boxed()
                del work
                dist.barrier()
                found = dist.Work.unbox(held)
                until = time.monotonic() + 20
                while not found.is_completed():
                    assert time.monotonic() < until, f"{what}, ended {has_ended}: C++ would wait forever"
                    time.sleep(0.001)
                found.wait()
                found.get_future().wait()


def _failed() -> None:
    """Drop a failed work: it keeps no objects of the frames that were active when it raised."""
    with world(timeout_s=30.0) as (rank, _size):

        class Large:
            pass

        def fail() -> Large:
            large = Large()
            work = dist.all_reduce(torch.ones(2 + rank), async_op=True)
            with pytest.raises(RuntimeError, match="count=3"):
                work.wait()
            return large

        fail()
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Large]


def test_a_failed_work_keeps_nothing(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_failed, 2)


def _empty_batch() -> Any:
    group = dist.group.WORLD
    assert group is not None
    group._start_coalescing(torch.device("cpu"))
    return group._end_coalescing(torch.device("cpu"))


def test_works_that_only_cpp_holds(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_left_to_cpp, 2)


def _weights(counts: tuple[int, ...], divides_by_all: bool, own: int | None) -> torch.Tensor:
    """Train on each rank's number of batches; own: as this rank of a joined DDP; None: all ranks in this process."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def backward(model: torch.nn.Module, rank: int, step: int) -> None:
        model(torch.ones(3, 4, dtype=torch.float64) * (step + rank)).square().mean().backward()

    if own is not None:
        model = torch.nn.parallel.DistributedDataParallel(net)
        with model.join(divide_by_initial_world_size=divides_by_all):
            for step in range(counts[own]):
                optimizer.zero_grad()
                backward(model, own, step)
                optimizer.step()
    else:
        for step in range(max(counts)):
            optimizer.zero_grad()
            active = [rank for rank, count in enumerate(counts) if step < count]
            for rank in active:
                backward(net, rank, step)
            for param in net.parameters():
                assert param.grad is not None
                param.grad /= len(counts) if divides_by_all else len(active)
            optimizer.step()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def _joined() -> None:
    with world(timeout_s=30.0) as (rank, _size):
        for divides_by_all in (True, False):
            for counts in ((2, 3), (4, 1)):
                found = _weights(counts, divides_by_all, rank)
                torch.testing.assert_close(found, _weights(counts, divides_by_all, None), rtol=1e-12, atol=1e-12)


def test_ddp_joins_ranks_with_fewer_batches(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_joined, 2)
