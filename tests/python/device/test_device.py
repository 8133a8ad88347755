"""Devices of the core as Python uses them, on a simulated one: streams, events, memory, `after`."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import zcomm
import zcomm_testing
from zcomm import _core


def bytes_of(device: _core.Device, nbytes: int) -> torch.Tensor:
    return torch.from_dlpack(device.allocate(nbytes))  # type: ignore[attr-defined]


def test_memory_is_a_tensor_that_keeps_it() -> None:
    device = zcomm_testing.simulated_device(memory_nbytes=1 << 20)
    memory = device.allocate(1000)
    tensor = torch.from_dlpack(memory)  # type: ignore[attr-defined]
    assert tensor.dtype == torch.uint8 and tensor.numel() == memory.nbytes == 1000
    assert tensor.data_ptr() == memory.address and memory.address % 256 == 0
    assert memory.__dlpack_device__() == (1, 0)
    assert tensor.view(torch.float32).isnan().all()
    del memory
    gc.collect()
    assert device.memory() == ((1 << 20) - 1000, 1 << 20)
    tensor.fill_(3)
    del tensor
    memory = device.allocate(1000)
    memory.__dlpack__()  # unused, so it frees itself
    del memory
    gc.collect()
    assert device.memory()[0] == 1 << 20


def test_streams_and_events() -> None:
    device = zcomm_testing.simulated_device(seed=3, max_delay_s=1e-3)
    first, second = device.make_stream(), device.make_stream(urgent=True)
    event = device.make_event()
    a, b, c = (bytes_of(device, 400).view(torch.float32) for _ in range(3))
    half = bytes_of(device, 200).view(torch.bfloat16)
    ones = torch.ones(100)
    first.copy(a.data_ptr(), ones.data_ptr(), 400)
    first.fill(b.data_ptr(), 0, 400)
    first.record(event)
    second.wait(event)
    f32, bf16 = _core.DType.float32, _core.DType.bfloat16
    second.reduce([c.data_ptr()], [a.data_ptr(), b.data_ptr(), a.data_ptr()], 100, f32, f32, _core.ReduceOp.sum)
    second.cast(half.data_ptr(), bf16, c.data_ptr(), f32, 100)
    second.synchronize()
    assert second.done() and event.done() and event.wait_for(0)
    assert torch.equal(c, ones * 2) and torch.equal(half, ones.bfloat16() * 2)
    host = device.adopt_stream(0)
    assert host.is_host and not first.is_host and host.native == 0
    host.fill(c.data_ptr(), 0, 400)
    assert c.abs().max() == 0
    with pytest.raises(ValueError, match=" src; expected at most"):
        first.reduce([c.data_ptr()], [a.data_ptr()] * 100, 100, f32, f32, _core.ReduceOp.sum)


def test_waiting_lets_other_threads_run() -> None:
    device = zcomm_testing.simulated_device(max_delay_s=0.02)
    stream, event = device.make_stream(), device.make_event()
    turns = [0]
    running = True

    def count() -> None:
        while running:
            turns[0] += 1

    other = threading.Thread(target=count)
    other.start()
    try:
        for wait in ("event", "stream", "drop"):
            for _ in range(10):
                stream.record(event)
            before = turns[0]
            if wait == "event":
                event.synchronize()
            elif wait == "stream":
                stream.synchronize()
            else:
                del stream  # finishes its work first
            assert event.done() and turns[0] > before
    finally:
        running = False
        other.join()


def test_handles() -> None:
    device, other = zcomm_testing.simulated_device(), zcomm_testing.simulated_device()
    memory, event = device.allocate(64), device.make_event(shared=True)
    opened = other.open_memory(device.share(memory.address + 4), 60)
    assert opened.address == memory.address + 4 and opened.nbytes == 60
    assert other.open_event(event.handle()).done()
    with pytest.raises(ValueError, match="a handle of 3 bytes"):
        other.open_event(b"abc")


def test_errors_say_what_to_do() -> None:
    device = zcomm_testing.simulated_device(memory_nbytes=1 << 20)
    with pytest.raises(zcomm.CudaError, match=r"simulated: out of memory: asked for 2\.00 MiB.*smaller batch"):
        device.allocate(2 << 20)
    stream = device.make_stream()
    device.lose_after(1)
    with pytest.raises(zcomm.CudaError, match=r"the GPU is lost.*restart the process"):
        stream.record(device.make_event())
    with pytest.raises(zcomm.CudaError, match="the GPU is lost"):
        device.allocate(1)


def test_a_cuda_device_where_there_is_none() -> None:
    if _core.cuda_available():
        pytest.skip("there is one")
    if _core.cuda_info() == "built without CUDA":
        with pytest.raises(NotImplementedError, match="built without CUDA"):
            _core.cuda_device(0)
    else:
        with pytest.raises(zcomm.CudaError, match="no CUDA device"):
            _core.cuda_device(0)


def test_a_collective_after_a_copy() -> None:
    mesh = _core.Mesh.connect(0, 1, listener := _core.Listener(), [listener.address], "token", 10.0)
    comm = _core.Communicator.create(mesh)
    device = zcomm_testing.simulated_device(seed=1, max_delay_s=2e-3)
    stream, event = device.make_stream(), device.make_event()
    source, slot = torch.arange(256.0), torch.zeros(256)
    for _ in range(10):
        stream.copy(slot.data_ptr(), source.data_ptr(), 1024)
    stream.record(event)
    waited = comm.after(event)
    barrier = comm.barrier("", True)
    assert waited is not None and barrier is not None
    barrier.wait()
    assert waited.done() and event.done() and torch.equal(slot, source)
    assert comm.after(event, async_op=False) is None
    comm.close()
    mesh.leave()
