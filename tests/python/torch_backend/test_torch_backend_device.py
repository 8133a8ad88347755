"""torch_backend's operations on device tensors, over simulated devices: ranks are threads, tensors are the CPU's.

torch's own streams cannot be simulated, so the tests check that each way to await a work returns after its end.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, BarrierOptions, ReduceScatterOptions

import simulated
import zcomm
import zcomm_testing
from test_cuda_ipc import simulated_world
from zcomm.torch_backend import device as _device
from zcomm.torch_backend.device import DeviceHalf, DevicePending, DeviceProcessGroup, Streams, device_of
from zcomm.torch_backend.group import ProcessGroup
from zcomm.torch_backend.options import made


class HostStreams(Streams):
    """Streams that are all the host; they record which stream waited for which event."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits: list[tuple[str, Any]] = []

    def side(self) -> Any:
        return contextlib.nullcontext()

    def current(self) -> Any:
        return None

    def record(self) -> Any:
        return object()

    def page_locked(self, like: torch.Tensor) -> torch.Tensor:
        return torch.empty(like.shape, dtype=like.dtype)

    def wait(self, event: Any) -> None:
        self.waits.append((threading.current_thread().name, event))

    def future(self) -> Any:
        return torch.futures.Future()


def in_halves(world: int, folder: Path, body: Callable[[DeviceHalf], None]) -> None:
    def run(comm: zcomm.Communicator) -> None:
        half = DeviceHalf(comm._joined, 30.0, HostStreams())
        try:
            body(half)
        finally:
            half.close()

    simulated_world(world, folder, run, max_delay_s=1e-4)


def asynchronous(opts: Any) -> Any:
    if hasattr(opts, "asyncOp"):
        opts.asyncOp = True
    return opts


@pytest.mark.parametrize("world", [1, 3])
def test_operations(world: int, tmp_path: Path) -> None:
    def body(half: DeviceHalf) -> None:
        rank = half._rank
        for is_async in (False, True):
            ready = asynchronous if is_async else (lambda opts: opts)
            tensor = torch.full((70_003,), float(rank + 1))
            strided = torch.full((40, 30), float(rank + 1)).t()
            half.allreduce([tensor], ready(AllreduceOptions())).wait()
            half.allreduce([strided], ready(AllreduceOptions())).wait()
            total = world * (world + 1) / 2
            assert tensor.eq(total).all() and strided.eq(total).all()
            out = torch.empty(5)
            half.reduce_scatter_single(out, torch.arange(5.0 * world), ready(ReduceScatterOptions())).wait()
            assert torch.equal(out, world * torch.arange(5.0 * world)[5 * rank : 5 * rank + 5])
            outs = [torch.empty(7) for _ in range(world)]
            half.allgather([outs], [torch.full((7,), float(rank))]).wait()
            assert [int(one[3]) for one in outs] == list(range(world))
            whole = torch.full((9,), float(rank))
            half.broadcast([whole], root=world - 1).wait()
            assert whole.eq(world - 1).all()
            half.barrier(ready(BarrierOptions())).wait()

    in_halves(world, tmp_path, body)


def test_every_way_to_the_end_comes_after_it(tmp_path: Path) -> None:
    def body(half: DeviceHalf) -> None:
        streams = half.streams
        assert isinstance(streams, HostStreams)
        for way in ("wait", "future", "future, then wait", "poll, then wait"):
            tensor = torch.ones(50_000)
            work = half.allreduce([tensor], asynchronous(made(AllreduceOptions, None)))
            if "future" in way:
                assert work.get_future().wait()[0].eq(2).all()
            while "poll" in way and not work.is_completed():
                pass
            if "wait" in way:
                before = len(streams.waits)
                work.wait()
                me = threading.current_thread().name
                assert [name for name, _ in streams.waits[before:]] == [me], way  # even if another thread finished it
            assert tensor.eq(2).all(), way

    in_halves(2, tmp_path, body)


def test_errors_keep_their_types(tmp_path: Path) -> None:
    def body(half: DeviceHalf) -> None:
        with pytest.raises(NotImplementedError, match="meta"):
            half.allreduce_coalesced([torch.ones(3), torch.ones(3, device="meta")])
        work = half.allreduce([torch.ones(3 + half._rank)], asynchronous(AllreduceOptions()))
        with pytest.raises(zcomm.CollectiveMismatch, match="count=3"):
            work.wait()

    in_halves(2, tmp_path, body)


def test_callbacks_and_dropped_works(tmp_path: Path) -> None:
    """Callbacks call collectives in one order, as on the host; a later one implies that copies back are complete."""

    def body(half: DeviceHalf) -> None:
        rank = half._rank

        def again(own: Any) -> float:
            tensor = own.value()[0].clone()
            work = half.allreduce([tensor], asynchronous(made(AllreduceOptions, None)))
            return float(work.get_future().wait()[0][0])

        chains = []
        for step in range(4):
            time.sleep(0.01 * ((step + rank) % 2))
            work = half.allreduce([torch.ones(3)], asynchronous(made(AllreduceOptions, None)))
            chains.append(work.get_future().then(again))
        strided = torch.full((40, 30), rank + 1.0).t()
        half.allreduce([strided], asynchronous(made(AllreduceOptions, None)))
        half.barrier(BarrierOptions()).wait()
        assert strided.eq(3).all() and [chain.wait() for chain in chains] == [4.0] * 4

    in_halves(2, tmp_path, body)


def test_several_works_are_one_with_a_future(tmp_path: Path) -> None:
    def body(half: DeviceHalf) -> None:
        tensors = [torch.ones(20_000), torch.ones(3)]
        works = [half.allreduce([tensor], asynchronous(made(AllreduceOptions, None))) for tensor in tensors]
        both = _device._AllOf(works)
        got = both.get_future().wait()
        assert [tensor[0].item() for tensor in got] == [2.0, 2.0] and both.wait() and both.is_success()
        assert both.exception() is None

    in_halves(2, tmp_path, body)


def test_operations_go_where_their_tensors_are() -> None:
    cpu = torch.ones(2)
    assert device_of(([cpu], cpu)) is None and device_of(()) is None and device_of(([[]], None, 3)) is None
    missing = [
        name
        for name in vars(DeviceHalf.__mro__[1]) | vars(DeviceHalf.__mro__[2])
        if not name.startswith("_") and name != "barrier" and name not in vars(DeviceProcessGroup)
    ]
    assert not missing, f"{missing} would run on the CPU's communicator"
    assert issubclass(DeviceProcessGroup, ProcessGroup)


class OneDevice(DeviceProcessGroup):
    """A process group on one device, the host."""

    def _streams(self, device: torch.device) -> HostStreams:
        return HostStreams()

    def _open_half(self, device: torch.device) -> DeviceHalf:
        raise AssertionError("messages need no communicator between devices")


def in_groups(world: int, body: Callable[[OneDevice], None], kind: type[OneDevice] = OneDevice) -> None:
    """Run ``body`` as each rank of a group, in threads."""
    store = torch.distributed.HashStore()

    def run(rank: int) -> None:
        group = kind(store, rank, world, timedelta(seconds=30))
        try:
            body(group)
        finally:
            group.shutdown()

    with ThreadPoolExecutor(world) as pool:
        for ended in [pool.submit(run, rank) for rank in range(world)]:
            ended.result()


def test_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "device_of", lambda values: torch.device("cpu"))

    def body(group: OneDevice) -> None:
        rank = group.rank()
        if rank == 2:
            return  # messages do not need this rank
        other = 1 - rank
        for count in (0, 3, 200_000):
            sent, got = torch.full((count, 2), rank + 1.0), torch.zeros(2, count).t()
            sending = group.send([sent], other, 5)
            sent.fill_(99.0)  # it has been read already
            receiving = group.recv([got], other, 5)
            assert isinstance(receiving, DevicePending)
            assert receiving.wait() and sending.wait()
            assert got.eq(other + 1.0).all()
        got = torch.zeros(4)
        receiving = group.recv_anysource([got], 7)
        group.send([torch.full((4,), rank + 1.0)], other, 7).wait()
        assert receiving.get_future().wait()[0].eq(other + 1.0).all() and receiving._source_rank() == other
        group._start_coalescing(torch.device("cuda", 0))
        group.recv([got], other)
        group.send([torch.full((4,), rank + 5.0)], other)
        group._end_coalescing(torch.device("cuda", 0)).wait()
        assert got.eq(other + 5.0).all()
        with pytest.raises(ValueError, match="send: a tensor is on meta, others are on cpu"):
            group.send([torch.ones(2), torch.ones(2, device="meta")], other)
        with pytest.raises(ValueError, match="recv: a tensor is on meta, others are on cpu"):
            group.recv([torch.ones(2, device="meta")], other)

    in_groups(3, body)


class Bound(OneDevice):
    """A group that is bound to devices that NCCL joins."""

    nccl: zcomm_testing.FakeNccl

    def _open_half(self, device: torch.device) -> DeviceHalf:
        control = self._join("meeting/cuda", self._rank, self._size, self._deadline_s)
        core = simulated.device(self._rank + 1, 1e-4)
        return DeviceHalf(simulated.over_nccl(self.nccl, control, core, messages=True), self._deadline_s, HostStreams())


def test_messages_of_a_bound_group_go_between_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device, "device_of", lambda values: torch.device("cpu"))
    monkeypatch.setattr(_device, "copied_to_host", None)  # not called
    Bound.nccl = nccl = zcomm_testing.FakeNccl()
    before = nccl.complaints

    def body(group: OneDevice) -> None:
        group._bind(torch.device("cpu"))
        rank, other = group.rank(), 1 - group.rank()
        for count in (0, 3, 200_000):
            sent, got = torch.full((count, 2), rank + 1.0), torch.zeros(2, count).t()
            sending, receiving = group.send([sent], other, 5), group.recv([got], other, 5)
            assert isinstance(sending, DevicePending) and isinstance(receiving, DevicePending)
            assert receiving.wait() and sending.wait()
            assert got.eq(other + 1.0).all()
        got = torch.zeros(40_000)
        receiving = group.recv_anysource([got], 7)
        group.send([torch.full((40_000,), rank + 1.0)], other, 7).wait()
        assert receiving.get_future().wait()[0].eq(other + 1.0).all() and receiving._source_rank() == other
        gots = [torch.zeros(40_000, dtype=torch.complex64) for _ in range(4)]
        group._start_coalescing(torch.device("cuda", 0))
        for number, each in enumerate(gots):  # as batch_isend_irecv does: receives first on both ranks
            group.recv([each], other, 0)
            group.send([torch.full((40_000,), 10.0 * number + rank, dtype=torch.complex64)], other, 0)
        group._end_coalescing(torch.device("cuda", 0)).wait()
        assert all(each.eq(10.0 * number + other).all() for number, each in enumerate(gots))
        with pytest.raises(zcomm.CollectiveMismatch, match="complex64"):
            if rank == 0:
                group.send([torch.ones(40_000)], other).wait()
            else:
                group.recv([gots[0]], other).wait()
        group.barrier().wait()

    in_groups(2, body, Bound)
    gc.collect()
    assert nccl.complaints == before
