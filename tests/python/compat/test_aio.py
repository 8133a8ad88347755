"""``aio_handle`` and the writers of ``deepspeed.io``: files of the program."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.compat.deepspeed import io
from zcomm.compat.deepspeed.ops.op_builder import AsyncIOBuilder

AIO = AsyncIOBuilder().load()
SIZES = [0, 1, 1024, 4096, 3 * 4096, 100_000, 1 << 20]


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", [1024, 4096, 1 << 20])
@pytest.mark.parametrize("locked", [False, True])
def test_bytes_and_places(tmp_path: Path, block: int, locked: bool) -> None:
    """Whole pages and other sizes, at whole pages and other places."""
    handle = AIO.aio_handle(block, 2, True, False, 2)
    got = (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism())
    assert got == (block, 2, 2) and handle.get_single_submit() and not handle.get_overlap_events()
    path = tmp_path / "file"
    path.write_bytes(b"x" * (2 << 20))
    expected = bytearray(path.read_bytes())
    for size in SIZES:
        for offset in (0, 4096, 4097):
            data = numbers(size, size + offset)
            out = torch.zeros(size, dtype=torch.uint8)
            if locked:
                data, out = (handle.new_cpu_locked_tensor(size, each).copy_(each) for each in (data, out))
                assert not size or handle.is_pinned(data[size // 2 :])
            assert handle.sync_pwrite(data, str(path), offset) == 1
            expected[offset : offset + size] = bytes(data.tolist())
            assert handle.sync_pread(out, path, offset) == 1 and torch.equal(out, data)
            if locked and size:
                assert handle.free_cpu_locked_tensor(data) and not handle.free_cpu_locked_tensor(data)
    assert path.read_bytes() == bytes(expected), "nothing else changed, and the file is not cut"


def test_operations_in_flight(tmp_path: Path) -> None:
    handle = AIO.aio_handle(1 << 16, 4, False, True, 2)
    tensors = [torch.randn(50_000, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16) for k in range(3)]
    for number, tensor in enumerate(tensors):
        assert handle.async_pwrite(tensor, tmp_path / f"{number}") == 0
    descriptor = os.open(tmp_path / "fd", os.O_CREAT | os.O_WRONLY)
    assert handle.async_pwrite(buffer=tensors[0], fd=descriptor, file_offset=512) == 0
    assert handle.async_pwrite(tensors[1], descriptor, 512 + tensors[0].nbytes) == 0
    os.close(descriptor)
    assert handle.wait() == 5 and handle.wait() == 0
    assert (tmp_path / "fd").stat().st_size == 512 + 2 * tensors[0].nbytes
    outs = [torch.empty_like(tensor) for tensor in tensors]
    versions = [out._version for out in outs]
    for number, out in enumerate(outs):
        assert handle.pread(out, tmp_path / f"{number}", False, True) == 0
    assert handle.wait() == 3 and [out._version > v for out, v in zip(outs, versions, strict=True)] == [True] * 3
    assert all(torch.equal(out, tensor) for out, tensor in zip(outs, tensors, strict=True))
    assert handle.pread(outs[0], tmp_path / "fd", True, False, 512 + tensors[0].nbytes) == 1
    assert torch.equal(outs[0], tensors[1])
    assert handle.write(tensors[2], tmp_path / "x", validate=True) == handle.read(outs[1], tmp_path / "x", True) == 0
    assert AIO.aio_write(tensors[0], tmp_path / "y", 4096, 2, False, False, True) == 0
    assert AIO.aio_read(outs[2], tmp_path / "y", 4096, 2, False, False, False) == 0 and torch.equal(outs[2], tensors[0])


def test_threads_share_a_handle(tmp_path: Path) -> None:
    """A synchronous call returns when its own data have moved, even if another thread waits."""
    handle = AIO.aio_handle(4096, 2, True, True, 2)
    wrong = []

    def run(number: int) -> None:
        data, out = numbers(50_000, number), torch.zeros(50_000, dtype=torch.uint8)
        for _ in range(20):
            done = handle.sync_pwrite(data, tmp_path / str(number)), handle.sync_pread(out, tmp_path / str(number))
            if done != (1, 1) or not torch.equal(out, data):
                wrong.append(number)
            out.zero_()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _in_child(handle: Any, path: Path) -> bool:
    child = os.fork()
    if not child:
        out = torch.zeros(5000, dtype=torch.uint8)
        os._exit(0 if handle.sync_pread(out, path) == 1 and torch.equal(out, numbers(5000)) else 1)
    return os.waitpid(child, 0)[1] == 0


def test_errors_name_the_file(tmp_path: Path) -> None:
    handle = AIO.aio_handle(4096)
    path = tmp_path / "short"
    handle.sync_pwrite(numbers(5000), path)
    assert _in_child(handle, path), "threads of the parent are not in a forked child"
    with pytest.raises(OSError, match=r"5000 bytes, 5001 are read from 0 on.*short"):
        handle.sync_pread(torch.empty(5001, dtype=torch.uint8), path)
    with pytest.raises(FileNotFoundError, match="none"):
        handle.async_pread(torch.empty(3), tmp_path / "none")
    with pytest.raises(ValueError, match="not contiguous"):
        handle.async_pwrite(torch.empty(4, 4).t(), path)
    with pytest.raises(ValueError, match="file_offset -1 is negative"):
        handle.async_pwrite(torch.empty(4), path, -1)
    with pytest.raises(ValueError, match="queue_depth=0"):
        AIO.aio_handle(4096, 0)
    with pytest.raises(TypeError, match="expected"):
        handle.pread(torch.empty(4), path, False)
    reader = os.open(path, os.O_RDONLY)
    handle.async_pwrite(torch.empty(4), reader)
    handle.async_pwrite(numbers(7), path)
    os.close(reader)
    with pytest.raises(OSError, match="Bad file descriptor"):
        handle.wait()
    assert handle.wait() == 0 and path.read_bytes()[:7] == bytes(numbers(7).tolist()), "the others have ended"


def test_a_sharded_weight_is_whole_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(300, 10)
    before = model.weight.detach().clone()
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=3, share_parameters=False)
    handle, out = AIO.aio_handle(), torch.empty(10, 300)
    handle.sync_pwrite(model.weight, tmp_path / "w")
    handle.sync_pread(out, tmp_path / "w")
    assert torch.equal(out, before)
    with pytest.raises((ValueError, RuntimeError)):
        handle.sync_pread(model.weight, tmp_path / "w")
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("double", [False, True])
def test_writers(tmp_path: Path, double: bool) -> None:
    state = {"a": torch.randn(3000), "b": [1, "two"], "c": torch.arange(10)}
    handle = AIO.aio_handle(4096, 4)
    pinned = handle.new_cpu_locked_tensor(8192, torch.empty(0, dtype=torch.uint8))
    fast = io.FastFileWriter(tmp_path / "fast", io.FastFileWriterConfig(handle, pinned, double_buffer=double))
    plain, mock = io.PyFileWriter(tmp_path / "plain"), io.MockFileWriter(tmp_path / "mock")
    for writer in (fast, plain, mock):
        torch.save(state, writer)
        writer.close()
    assert (tmp_path / "fast").read_bytes() == (tmp_path / "plain").read_bytes()
    assert fast.written == plain.written == mock.written == (tmp_path / "fast").stat().st_size
    found = torch.load(tmp_path / "fast")
    assert torch.equal(found["a"], state["a"]) and found["b"] == [1, "two"] and not (tmp_path / "mock").exists()
    with pytest.raises(ValueError, match="num_parallel_writers"):
        io.FastFileWriter(tmp_path / "x", io.FastFileWriterConfig(handle, pinned, num_parallel_writers=2))
