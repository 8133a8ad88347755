"""backend="cuda_ipc": the backends' suite over simulated devices (ranks are threads), and over real ones if present.

Tensors of a simulated device are CPU tensors; the host is the caller's stream. IPC between processes needs CUDA.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zcomm_testing
from backend_calls import (
    all_to_all_mismatch,
    any_source,
    asynchronous,
    bad_arguments,
    duplicates_keep_their_own_order,
    message_mismatch,
    messages,
    messages_on_device,
    mismatches,
    rank_that_leaves,
    split,
    suspended_deadline,
)
from backend_values import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    equal,
    expected,
    gather_and_scatter,
    lists,
    numbers,
    raises,
    reduce,
    reduce_scatter,
    rounding,
)
from thread_world import thread_world
from tiers import slow
from zcomm import _core
from zcomm.backends import cuda_ipc
from zcomm.bootstrap.join import Joined

DEVICES = torch.cuda.device_count() if _core.cuda_available() else 0
Check = Callable[[zcomm.Communicator], None]
SUITE: list[Check] = [
    *(all_reduce, rounding, lists, reduce, reduce_scatter),
    *(all_gather, broadcast, gather_and_scatter, all_to_all),
    *(asynchronous, bad_arguments, messages, any_source, split, duplicates_keep_their_own_order, suspended_deadline),
    *(mismatches, all_to_all_mismatch, message_mismatch, rank_that_leaves),
]
OF_SEVERAL = (bad_arguments, messages, mismatches, all_to_all_mismatch, message_mismatch, rank_that_leaves)


def simulated_world(world: int, folder: Path, body: Check, max_delay_s: float = 0.0) -> None:
    """Run ``body`` as each rank of a world of threads with a simulated device each."""

    def run(joined: Joined) -> None:
        rank = joined.core.rank
        device = zcomm_testing.simulated_device(seed=rank, max_delay_s=max_delay_s, name=f"simulated:{rank}")
        comm = zcomm.Communicator(cuda_ipc.over(joined, device, "cpu"))
        try:
            body(comm)
        finally:
            comm.close()

    thread_world(world, folder, run)


@pytest.mark.parametrize("world", [slow(1), slow(2), 3])
def test_suite_on_simulated_devices(world: int, tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        assert comm.backend == "cuda_ipc"
        for check in SUITE:
            if world == 1 and check in OF_SEVERAL:
                continue
            own = comm.duplicate()
            check(own)
            own.close()
        comm.barrier()

    simulated_world(world, tmp_path, body)


def test_symmetric_tensors_and_late_streams(tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        tensor = comm.empty(70_003, torch.bfloat16)
        assert tensor.eq(0).all() and tensor.dtype == torch.bfloat16 and comm.empty(0).numel() == 0
        inputs = [numbers(70_003, torch.bfloat16, rank) for rank in range(comm.world_size)]
        for _ in range(3):
            tensor.copy_(inputs[comm.rank])
            work = comm.all_reduce(tensor, async_op=True)
            work.wait()
            assert work.done()
            equal(tensor, expected(inputs, "sum"), "all_reduce of a symmetric tensor")
        raises(NotImplementedError, "cuda", lambda: comm.empty(4, device="cuda"))
        raises(NotImplementedError, "share", lambda: comm.shared_empty(4))
        before = comm.memory()
        comm.all_reduce(torch.ones(9))
        assert comm.memory() == before and before["slot_nbytes"] >= 4 * (4 << 20)

    simulated_world(2, tmp_path, body, max_delay_s=1e-4)


def test_out_of_device_memory_names_the_rank(tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        raises(zcomm.CudaError, r"allocating \d+ bytes was refused on rank 0", lambda: comm.empty(1 << 60, torch.uint8))
        tensor = torch.ones(5)
        comm.all_reduce(tensor)
        assert tensor.eq(2).all()

    simulated_world(2, tmp_path, body)


def test_a_lost_device_is_a_cuda_error_here_and_an_error_there(tmp_path: Path) -> None:
    def body(comm: zcomm.Communicator) -> None:
        tensor = torch.ones(50_000)
        if comm.rank == 1:
            device = comm._joined.core_device
            assert device is not None
            device.lose_after(5)
            raises(zcomm.CudaError, "lost", lambda: comm.all_reduce(tensor))
        else:
            with pytest.raises((RuntimeError, ConnectionError), match="rank 1"):
                for _ in range(9):
                    comm.all_reduce(tensor)
        with pytest.raises((RuntimeError, ConnectionError), match="unusable since"):
            comm.barrier()

    simulated_world(2, tmp_path, body)


@pytest.mark.skipif(DEVICES > 0, reason="needs a machine without CUDA devices")
def test_without_a_device_it_says_so() -> None:
    built = not _core.cuda_info().startswith("built without")
    for arguments in (("cuda_ipc",), ("auto", 60.0, "cuda"), ("cuda_ipc", 60.0, "cuda:1")):
        kind = zcomm.CudaError if built else NotImplementedError
        with pytest.raises(kind, match=r"no CUDA device|needs a CUDA device"):
            zcomm.init(*arguments)
    with pytest.raises(ValueError, match="'shm' moves CPU tensors"):
        zcomm.init("shm", device="cuda")
    with pytest.raises(ValueError, match="'cuda_ipc' moves CUDA tensors"):
        zcomm.init("cuda_ipc", device="cpu")
    assert not zcomm.is_initialized()


def test_mixed_devices_are_named(world_of_one: None) -> None:
    here, there = torch.ones(3), torch.ones(3, device="meta")
    for call in (
        lambda: zcomm.all_reduce([here, there]),
        lambda: zcomm.all_gather(here, out=there),
        lambda: zcomm.all_to_all([there], [here]),
    ):
        raises(ValueError, "meta.*cpu|cpu.*meta", call)


# ---- with devices; several ranks may share one ----
def values_on_devices(backend: str) -> None:
    comm = zcomm.init(backend, timeout=60.0, device="cuda")
    assert comm.backend == "cuda_ipc", comm.describe()
    rank, world = comm.rank, comm.world_size
    device = comm._device
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for count in (0, 1, 65, 70_003, 3_000_001):
            inputs = [numbers(count, dtype, r) for r in range(world)]
            for symmetric in (False, True):
                tensor = comm.empty(count, dtype) if symmetric else torch.empty(count, dtype=dtype, device=device)
                tensor.copy_(inputs[rank])
                comm.all_reduce(tensor)
                equal(tensor.cpu(), expected(inputs, "sum"), f"all_reduce {dtype} {count} {symmetric}")
            equal(comm.all_gather(inputs[rank].to(device)).cpu(), torch.cat(inputs), f"all_gather {dtype} {count}")
    parts = [torch.full((rank + 2 * b,), float(rank), device=device) for b in range(world)]
    outs = [torch.empty(a + 2 * rank, device=device) for a in range(world)]
    comm.all_to_all(outs, parts)
    for a, out in enumerate(outs):
        assert out.eq(a).all()
    part = comm.split(0, key=-rank)
    assert part is not None
    assert part.all_gather(torch.tensor([rank], device=device)).tolist() == list(range(world))[::-1]
    raises(NotImplementedError, "cpu", lambda: comm.all_reduce(torch.ones(3)))
    raises(ValueError, "cuda.*cpu|cpu.*cuda", lambda: comm.all_reduce([torch.ones(3, device=device), torch.ones(3)]))
    if world > 1:
        messages_on_device(comm)
        twin = comm.duplicate()
        raises(zcomm.CollectiveMismatch, "count=", lambda: twin.all_reduce(torch.ones(3 + rank, device=device)))


def order_on_devices() -> None:
    """Issue slow work before each call and an overwrite after it, on several streams: the host never waits."""
    comm = zcomm.init("cuda_ipc", timeout=60.0)
    world, device = comm.world_size, comm._device
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    big = torch.randn(2048, 2048, device=device)
    results, works = [], []
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            for _ in range(comm.rank * 3):
                big @ big
            tensor = torch.full((300_000,), float(turn + comm.rank), device=device)
            work = comm.all_reduce(tensor, async_op=True)
            works.append(work)
        with torch.cuda.stream(streams[(turn + 1) % 3]):
            work.wait()
            results.append(tensor.clone())
            tensor.fill_(-1.0)
    torch.cuda.synchronize()
    for turn, result in enumerate(results):
        assert result.eq(world * turn + world * (world - 1) / 2).all(), turn
    assert all(work.done() for work in works)


def host_bits_on_devices(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over all ranks, computed on the device."""
    comm = zcomm.init("cuda_ipc", timeout=60.0)
    mine = values[comm.rank].to(comm._device)
    comm.all_reduce(mine)
    return mine.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and a build and a torch with CUDA")
def test_on_devices(world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(values_on_devices, world_size, "cuda_ipc")
    run_ranks(order_on_devices, world_size)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and a build and a torch with CUDA")
def test_auto_takes_it_on_one_device(run_ranks: Callable[..., list[Any]]) -> None:
    if DEVICES > 1 and not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("the devices of this machine do not reach each other")
    run_ranks(values_on_devices, 2, "auto")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and a build and a torch with CUDA")
def test_bits_of_the_rank_order_sum(run_ranks: Callable[..., list[Any]]) -> None:
    values = torch.randn(4, 100_003) * torch.logspace(-6, 6, 100_003)
    wanted = values[0] + values[1] + values[2] + values[3]
    for got in run_ranks(host_bits_on_devices, 4, values):
        assert torch.equal(got, wanted)


def lose_a_rank(folder: str) -> None:
    """Kill a rank: the others record its number and exit at once, without cleanup next to a dead peer."""
    comm = zcomm.init("cuda_ipc", timeout=20.0)
    tensor = torch.ones(1 << 20, device=comm._device)
    comm.all_reduce(tensor)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            comm.all_reduce(tensor)
    except zcomm.PeerLost as lost:
        Path(folder, str(comm.rank)).write_text(f"lost {lost.rank}")
        os._exit(0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and a build and a torch with CUDA")
def test_a_killed_rank_is_named(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Runs last in this file, because a killed process may leave a device that recovers slowly."""
    results = run_ranks(lose_a_rank, 3, str(tmp_path), timeout_s=60, check=False)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert said == {"0": "lost 1", "2": "lost 1"}, "\n".join(result.describe() for result in results)
