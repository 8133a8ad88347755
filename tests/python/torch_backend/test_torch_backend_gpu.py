"""torch.distributed over "zcomm" on a rank's device: exact results, in the order of torch's streams.

The same tests run on the CPU, so that their expected values are verified without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torch_world import make, world
from zcomm import _core

pytestmark = pytest.mark.slow

DEVICES = torch.cuda.device_count() if _core.cuda_available() else 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device here")]
WHERE = ["cpu", pytest.param("cuda", marks=ON_GPU)]
Run = Callable[..., list[Any]]


def device_of_rank(where: str, rank: int) -> torch.device:
    if where == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank % DEVICES)
    return torch.device("cuda", rank % DEVICES)


def collectives(where: str) -> None:
    with world() as (rank, size):
        device = device_of_rank(where, rank)
        for count in (1, 1000, 3_000_001):
            inputs = [make(r, size * count) for r in range(size)]
            total = torch.stack(inputs).sum(0)
            mine = inputs[rank].to(device, copy=True)
            reduced = mine * 2  # queued on the stream before the operation
            dist.all_reduce(reduced)
            assert torch.equal(reduced.cpu(), total * 2), count
            shard = torch.empty(count, device=device)
            dist.reduce_scatter_tensor(shard, mine)
            assert torch.equal(shard.cpu(), total[rank * count : (rank + 1) * count]), count
            whole = torch.empty(size * count, device=device)
            work = dist.all_gather_into_tensor(whole, shard, async_op=True)
            work.wait()
            assert torch.equal((whole + 1).cpu(), total + 1), count
            turned = torch.empty_like(mine)
            dist.all_to_all_single(turned, mine)
            assert torch.equal(turned.cpu(), torch.cat([i[rank * count : (rank + 1) * count] for i in inputs])), count
            dist.broadcast(mine, size - 1)
            assert torch.equal(mine.cpu(), inputs[-1]), count
            future = dist.all_reduce(mine, async_op=True).get_future()
            assert torch.equal(future.wait()[0].cpu(), inputs[-1] * size), count
        dist.barrier()


def messages(where: str) -> None:
    with world() as (rank, size):
        device = device_of_rank(where, rank)
        after, before = (rank + 1) % size, (rank - 1) % size
        for count in (0, 5, 1_000_003):
            outgoing = make(rank, count).to(device) * 3
            request = dist.isend(outgoing, after)
            outgoing = outgoing + 1
            got = torch.zeros(count, 2, device=device)[:, 0]
            assert dist.recv(got, before) == before
            request.wait()
            assert torch.equal((got + 1).cpu(), make(before, count) * 3 + 1), count
        got = torch.zeros(7, device=device)
        operations = [
            dist.P2POp(dist.irecv, got, before),
            dist.P2POp(dist.isend, make(rank, 7).to(device), after),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        assert torch.equal(got.cpu(), make(before, 7))
        if rank < 2:  # no other rank is needed
            other = 1 - rank
            future = dist.irecv(got, other).get_future()
            dist.send(make(rank, 7, seed=1).to(device), other)
            assert torch.equal(future.wait()[0].cpu(), make(other, 7, seed=1))


def ddp(where: str) -> None:
    with world() as (rank, size):
        device = device_of_rank(where, rank)
        torch.manual_seed(0)
        plain, wrapped = nn.Linear(300, 200).to(device), nn.Linear(300, 200).to(device)
        wrapped.load_state_dict(plain.state_dict())
        model = nn.parallel.DistributedDataParallel(wrapped, device_ids=None if where == "cpu" else [device])
        for step in range(3):
            plain.zero_grad()
            model.zero_grad()
            model(make(rank, 4, 300, seed=step).to(device)).sum().backward()
            for r in range(size):
                plain(make(r, 4, 300, seed=step).to(device)).sum().backward()
            for ours, theirs in zip(wrapped.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad / size, rtol=1e-6, atol=0.0)  # zcomm divides first


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("body", [collectives, messages, ddp])
def test_on_the_ranks_device(run_ranks: Run, body: Callable[[str], None], where: str, world_size: int) -> None:
    run_ranks(body, world_size, where)
