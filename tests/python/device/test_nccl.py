"""backend="nccl": its error if it cannot run; on CUDA devices, values against exact sums."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from backend_calls import messages_on_device
from backend_values import equal, expected, numbers, raises
from zcomm import _core

DEVICES = torch.cuda.device_count() if _core.cuda_available() else 0


@pytest.mark.skipif(DEVICES > 0, reason="needs a machine without CUDA devices")
def test_without_a_device_or_library_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotImplementedError, match="NCCL"):
        zcomm.init("nccl")
    assert not zcomm.is_initialized()
    monkeypatch.setattr(_core, "nccl_version", lambda library: "2.27.3")  # the library is found, but no device
    with pytest.raises((NotImplementedError, zcomm.CudaError), match=r"CUDA device.*2\.27\.3"):
        zcomm.init("nccl")
    assert not zcomm.is_initialized()


def test_path_of_the_wheel_is_optional() -> None:
    assert isinstance(importlib.import_module("zcomm.backends.nccl").library_path(), str)


# ---- with devices ----
def values() -> None:
    comm = zcomm.init("nccl", timeout=30.0)
    device, rank, world = f"cuda:{comm.local_rank}", comm.rank, comm.world_size
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for count in (0, 1, 65, 70_003):
            inputs = [numbers(count, dtype, r) for r in range(world)]
            tensor = inputs[rank].to(device)
            comm.all_reduce(tensor)
            equal(tensor.cpu(), expected(inputs, "sum"), f"all_reduce {dtype} {count}")
            equal(comm.all_gather(inputs[rank].to(device)).cpu(), torch.cat(inputs), f"all_gather {dtype} {count}")
            tensor = inputs[rank].to(device)
            comm.broadcast(tensor, root=world - 1)
            equal(tensor.cpu(), inputs[world - 1], f"broadcast {dtype} {count}")
    bucket = torch.arange(4.0 * world, device=device)
    equal(comm.reduce_scatter(bucket).cpu(), world * torch.arange(4.0 * world)[4 * rank : 4 * rank + 4], "shard")
    for dtype in (torch.float32, torch.bfloat16):  # the CPU's bits
        inputs = [
            torch.randn(world * 70_003, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)
        ]
        total = torch.zeros(70_003, device=device)
        for _ in range(2):
            comm.reduce_scatter(inputs[rank].to(device), "avg", out=total, accumulate=True)
        mine = [each.view(world, -1)[rank].float() for each in inputs]
        mean = functools.reduce(torch.add, mine) / world
        equal(total.cpu(), mean + mean, f"sums of {dtype}")
    comm.verify(behind=True)
    comm.verify()
    parts = [torch.full((rank + 2 * b,), float(rank), device=device) for b in range(world)]
    outs = [torch.empty(a + 2 * rank, device=device) for a in range(world)]
    comm.all_to_all(outs, parts)
    for a, out in enumerate(outs):
        assert out.eq(a).all()
    whole = comm.gather(torch.full((3,), float(rank), device=device), root=0)
    out = torch.empty(3, device=device)
    comm.scatter(out, whole, root=0)
    assert out.eq(rank).all()
    part = comm.split(0, key=-rank)
    assert part.all_gather(torch.tensor([rank], device=device)).tolist() == list(range(world))[::-1]
    raises(NotImplementedError, "cpu", lambda: comm.all_reduce(torch.ones(3)))
    if world > 1:
        messages_on_device(comm)
        twin = comm.duplicate()

        def differ() -> None:  # the call starts, and is compared behind
            twin.all_reduce(torch.ones(3 + rank, device=device))
            twin.verify()

        raises(zcomm.CollectiveMismatch, "count=", differ)
    comm.all_reduce(bucket)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.skipif(DEVICES == 0, reason="needs CUDA devices, and a build and a torch with CUDA")
def test_values(world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    if world_size > DEVICES:
        pytest.skip(f"needs {world_size} CUDA devices; this machine has {DEVICES}")
    run_ranks(values, world_size)
