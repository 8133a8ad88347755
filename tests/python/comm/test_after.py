"""``Communicator.after`` and ``order="rank"`` from Python, in worlds of threads. Failures: tests/cpp/coll."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zcomm
from thread_world import thread_world
from zcomm.bootstrap.join import Joined
from zcomm.comm.communicator import Communicator
from zcomm.comm.work import Work
from zcomm.profiling.taps import COLLECTIVES, Proxy


class NoTrace:
    def add(self, *_args: object, **_options: object) -> None: ...


def _chain(inner: Communicator, outer: Communicator) -> list[torch.Tensor]:
    """Sum each of some buckets on one communicator, then on the other one; return the results."""
    buckets = [torch.full((1000 * n,), float(inner.rank + n)) for n in range(1, 5)]
    works: list[Work] = []
    for bucket in buckets:
        first = inner.all_reduce(bucket, async_op=True, order="rank")
        works += [first, outer.after(first), outer.all_reduce(bucket, async_op=True)]
    for work in works:
        work.wait()
    assert all(work.done() for work in works)
    return buckets


@pytest.mark.parametrize("profiled", [False, True])
def test_operations_start_after_those_of_another_communicator(tmp_path: Path, profiled: bool) -> None:
    def body(joined: Joined) -> list[torch.Tensor]:
        inner = Communicator(joined)
        outer = inner.duplicate()
        proxies = []
        for comm in (inner, outer) if profiled else ():
            proxies.append(Proxy(comm._core, "lane", COLLECTIVES, NoTrace(), serial=True))
            comm._core = proxies[-1]  # type: ignore[assignment]
        buckets = _chain(inner, outer)
        for comm, proxy in zip((inner, outer), proxies, strict=False):
            comm._core = proxy.inner
            proxy.close()
        inner.close()
        outer.close()
        return buckets

    for buckets in thread_world(3, tmp_path, body):
        for n, bucket in enumerate(buckets, 1):
            assert bucket.eq(3 * (0 + 1 + 2 + 3 * n)).all()


def test_the_error_of_the_awaited_operation(tmp_path: Path) -> None:
    def body(joined: Joined) -> None:
        inner = Communicator(joined)
        outer = inner.duplicate()
        first = inner.all_reduce(torch.ones(10 + inner.rank), async_op=True, name="first")
        assert first is not None
        entry = outer.after(first)
        for work in (first, entry):
            with pytest.raises(zcomm.CollectiveMismatch, match="count=10 'first'"):
                work.wait()
        with pytest.raises(RuntimeError, match="after: the operation of another communicator"):
            outer.barrier()
        inner.close()
        outer.close()

    thread_world(2, tmp_path, body)


def test_arguments(tmp_path: Path) -> None:
    def body(joined: Joined) -> None:
        comm = Communicator(joined)
        with pytest.raises(TypeError, match="after: pass the Work of an asynchronous operation, got Tensor"):
            comm.after(torch.ones(1))  # type: ignore[arg-type]
        for call in (comm.all_reduce, comm.reduce_scatter):
            with pytest.raises(ValueError, match="order='ring': expected"):
                call(torch.ones(4), order="ring")
        shard = comm.reduce_scatter(torch.arange(6.0), order="rank")
        assert isinstance(shard, torch.Tensor) and shard.tolist() == list(range(6))
        comm.close()

    thread_world(1, tmp_path, body)
