"""The CUDA device together with torch on a GPU: adopted streams, graphs, shared memory, wording of errors."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

import zcomm
import zcomm_testing
from zcomm import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (_core.cuda_available() and torch.cuda.is_available()), reason="no GPU, or a build without"),
]


@pytest.fixture
def device() -> Iterator[_core.Device]:
    device = _core.cuda_device(0)
    yield device
    device.lose_after(0)


def adopted(device: _core.Device) -> _core.Stream:
    return device.adopt_stream(torch.cuda.current_stream().cuda_stream)


def test_torch_s_stream_is_honoured(device: _core.Device) -> None:
    for side in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(side):
            stream, copy, event = adopted(device), device.make_stream(), device.make_event()
            assert stream.native == side.cuda_stream and not stream.is_host
            host = torch.empty(1 << 20, dtype=torch.float32, pin_memory=True)
            for value in range(10):
                x = torch.full((1 << 20,), float(value), device="cuda") * 2
                stream.record(event)
                copy.wait(event)
                copy.copy(host.data_ptr(), x.data_ptr(), 4 << 20)
                copy.record(event)
                event.synchronize()
                assert event.done() and bool((host == 2 * value).all())


def test_memory_is_a_torch_tensor(device: _core.Device) -> None:
    free = device.memory()[0]
    memory = device.allocate(64 << 20)
    assert device.memory()[0] <= free and memory.__dlpack_device__() == (2, 0)
    tensor = torch.from_dlpack(memory).view(torch.float32)  # type: ignore[attr-defined]
    assert tensor.is_cuda and tensor.data_ptr() == memory.address
    tensor.fill_(2)
    assert float(tensor.sum()) == 2 * tensor.numel()


def test_a_graph_captures_what_streams_are_given(device: _core.Device) -> None:
    a, b, total = (torch.zeros(10001, device="cuda") for _ in range(3))
    half = torch.zeros(10001, device="cuda", dtype=torch.bfloat16)
    host = torch.zeros(10001, pin_memory=True)
    copy, forked, joined = device.make_stream(), device.make_event(), device.make_event()
    f32 = _core.DType.float32

    def step() -> None:
        stream = adopted(device)
        b.copy_(a * 3)
        stream.reduce([total.data_ptr()], [a.data_ptr(), b.data_ptr()], 10001, f32, f32, _core.ReduceOp.sum)
        stream.record(forked)
        copy.wait(forked)
        copy.copy(host.data_ptr(), total.data_ptr(), 40004)
        copy.cast(half.data_ptr(), _core.DType.bfloat16, total.data_ptr(), f32, 10001)
        copy.record(joined)
        stream.wait(joined)
        stream.fill(b.data_ptr(), 0, 40004)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # before the capture, so that kernels are loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for value in (1.0, 5.0):
        a.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((host == 4 * value).all()) and bool((half == 4 * value).all()) and not b.any()


def test_queries_do_not_spoil_another_stream_s_capture(device: _core.Device) -> None:
    a, graph = torch.zeros(100, device="cuda"), torch.cuda.CUDAGraph()
    other, event = device.make_stream(), device.make_event()
    other.record(event)
    with torch.cuda.graph(graph):
        a += 1
        event.wait_for(1.0)
        event.synchronize()
        memory = device.allocate(1024)
        a += 1
    graph.replay()
    assert float(a[0]) == 2 and memory.nbytes == 1024


def test_errors_say_what_to_do(device: _core.Device) -> None:
    total = device.memory()[1]
    with pytest.raises(zcomm.CudaError, match=r"cuda:0: out of memory: asked for .* are free.*smaller batch"):
        device.allocate(2 * total)
    device.allocate(1024)
    with pytest.raises(ValueError, match="is not there"):
        _core.cuda_device(torch.cuda.device_count())
    stream, event = device.make_stream(), device.make_event()
    device.lose_after(1)
    with pytest.raises(zcomm.CudaError, match=r"cuda:0: the GPU is lost.*restart the process"):
        stream.record(event)
    with pytest.raises(zcomm.CudaError, match="the GPU is lost"):
        _core.cuda_device(0).make_stream()  # for all devices of this GPU
    device.lose_after(0)
    stream.record(event)
    event.synchronize()


def _reader(pipe: Connection) -> None:
    device = _core.cuda_device(0)
    memory_handle, event_handle = pipe.recv()
    memory, event = device.open_memory(memory_handle, 4096), device.open_event(event_handle)
    stream = device.make_stream()
    host = torch.zeros(4096, dtype=torch.uint8)
    stream.wait(event)
    stream.copy(host.data_ptr(), memory.address, 4096)
    stream.synchronize()
    pipe.send(bool((host == 7).all()))
    pipe.recv()


@pytest.mark.parametrize("by_torch", [False, True])
def test_another_process_opens_memory_and_events(device: _core.Device, by_torch: bool) -> None:
    tensor = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda")
    memory = device.allocate(1 << 16)
    address = (tensor.data_ptr() if by_torch else memory.address) + 1024
    stream, event = device.make_stream(), device.make_event(shared=True)
    torch.cuda.synchronize()
    stream.fill(address, 7, 4096)
    stream.record(event)
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_reader, args=(theirs,))
    other.start()
    ours.send((device.share(address), event.handle()))
    assert ours.poll(100) and ours.recv() is True
    ours.send(None)
    other.join()
    assert other.exitcode == 0


def test_a_recorded_gpu() -> None:
    trace = zcomm_testing.Trace()
    device = zcomm_testing.record_device(_core.cuda_device(0), trace)
    first, second, event = device.make_stream(), device.make_stream(), device.make_event()
    memory = device.allocate(4096)
    first.fill(memory.address, 1, 4096)
    second.fill(memory.address, 2, 4096)
    (race,) = trace.races()
    assert "stream 1 of cuda:0" in str(race)
    second.record(event)
    first.wait(event)
    first.fill(memory.address, 3, 4096)
    first.synchronize()
    assert trace.race_count == 1
