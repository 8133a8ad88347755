"""Training over "zcomm": DDP, FSDP2 and DTensor give the results of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tiers import slow
from torch_world import world


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 33, bias=False), nn.ReLU(), nn.Linear(33, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(rank))


def gradients_of_all(size: int) -> list[torch.Tensor]:
    """Compute the average over the ranks' losses, in one process."""
    net = model()
    (sum(net(batch(r)).square().mean() for r in range(size)) / size).backward()  # type: ignore[union-attr]
    return [parameter.grad for parameter in net.parameters()]  # type: ignore[misc]


def check_gradients(net: nn.Module, wanted: list[torch.Tensor], what: str, rtol: float = 1e-5) -> None:
    for got, want in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(got.grad, want, rtol=rtol, atol=rtol / 10, msg=lambda m: f"{what}: {m}")


def _ddp() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with world() as (rank, size):
        wanted = gradients_of_all(size)
        for settings in (
            {},
            {"bucket_cap_mb": 0.001},
            {"static_graph": True},
            {"find_unused_parameters": True},
            {"gradient_as_bucket_view": True},
        ):
            net = DistributedDataParallel(model(seed=rank), **settings)  # rank 0's weights are sent to all
            for step in range(3):
                net.zero_grad()
                net(batch(rank)).square().mean().backward()
                if rank == 0 or step:
                    continue
            reference = model()
            for got, want in zip(net.module.parameters(), reference.parameters(), strict=True):
                assert torch.equal(got, want), f"{settings}: weights are not rank 0's"
            check_gradients(net.module, wanted, str(settings))
        for hook, rtol in ((default_hooks.allreduce_hook, 1e-5), (default_hooks.fp16_compress_hook, 5e-3)):
            net = DistributedDataParallel(model(), bucket_cap_mb=0.001)
            net.register_comm_hook(None, hook)
            net(batch(rank)).square().mean().backward()
            check_gradients(net.module, wanted, hook.__name__, rtol)
        net = DistributedDataParallel(model())
        with net.no_sync():
            net(batch(rank)).square().mean().backward()
        own = model()
        own(batch(rank)).square().mean().backward()
        check_gradients(net.module, [p.grad for p in own.parameters()], "no_sync")  # type: ignore[misc]


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        return self.second(x) if second else self.first(x)


def _ddp_unused() -> None:
    """Each rank uses another part of the model in each step."""
    with world() as (rank, size):
        net = DistributedDataParallel(TwoWays(), find_unused_parameters=True)
        for step in range(2):
            net.zero_grad()
            net(torch.ones(1, 5), (rank + step) % 2 == 1).sum().backward()
            users = sum((r + step) % 2 == 1 for r in range(size))
            for layer, count in ((net.module.first, size - users), (net.module.second, users)):
                if count:
                    torch.testing.assert_close(layer.weight.grad, torch.full((5, 5), count / size))


def _ddp_compiled() -> None:
    """Train a compiled model with buffers: DDP broadcasts them from C++ while Dynamo watches Python frames."""

    def normed() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))

    def collectives(tensor: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        whole = torch.zeros(dist.get_world_size() * tensor.numel())
        dist.all_gather_into_tensor(whole, tensor * (dist.get_rank() + 1))
        dist.barrier()
        return whole * 2

    with world() as (rank, size):
        plain, compiled = DistributedDataParallel(normed()), DistributedDataParallel(normed())
        run = torch.compile(compiled, backend="aot_eager")
        for step in range(3):
            for net, forward in ((plain, plain), (compiled, run)):
                net.zero_grad()
                forward(batch(size * step + rank)).square().mean().backward()
            check_gradients(compiled.module, [p.grad for p in plain.parameters()], "compiled")  # type: ignore[misc]
            for got, want in zip(compiled.buffers(), plain.buffers(), strict=True):
                torch.testing.assert_close(got, want)
        dist.barrier()
        got = torch.compile(collectives, backend="aot_eager")(torch.ones(2))
        assert got.tolist() == [2.0 * size * (r + 1) for r in range(size) for _ in range(2)]


def _sharded() -> None:
    """FSDP2: two steps give DDP's weights."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    with world() as (rank, _size):
        replicated = DistributedDataParallel(model())
        sharded = model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(sharded)
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (replicated, sharded)]
        for _ in range(2):
            losses = []
            for net, optimizer in zip((replicated, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(batch(rank)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for want, got in zip(replicated.module.parameters(), sharded.parameters(), strict=True):
            assert isinstance(got, DTensor)
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-6)


def _dtensor() -> None:
    """DTensor and functional collectives: C++ calls the group, which gets works and waits for them."""
    import torch.distributed._functional_collectives as functional
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with world() as (rank, size):
        mesh = init_device_mesh("cpu", (size,))
        left = torch.arange(24.0).view(6, 4)
        right = torch.arange(20.0).view(4, 5)
        product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
        assert torch.equal(product.full_tensor(), left @ right)
        rows = distribute_tensor(torch.arange(7.0), mesh, [Shard(0)])
        assert torch.equal(rows.redistribute(mesh, [Replicate()]).to_local(), torch.arange(7.0))
        group = dist.group.WORLD
        mine = torch.arange(float(size)) + rank
        total = functional.all_reduce(mine, "sum", group)
        assert torch.equal(total, size * torch.arange(float(size)) + sum(range(size)))
        assert functional.all_gather_tensor(mine, 0, group).shape == (size * size,)
        part = functional.reduce_scatter_tensor(mine, "sum", 0, group)
        assert part.tolist() == [size * rank + sum(range(size))]
        turned = functional.all_to_all_single(mine, [1] * size, [1] * size, group)
        assert turned.tolist() == [rank + r for r in range(size)]
        assert torch.equal(functional.broadcast(mine, 0, group), torch.arange(float(size)))
        both = functional.all_reduce_coalesced([mine, mine * 2], "avg", group)
        torch.testing.assert_close(both[1], 2 * both[0])
        # pending when it is passed to another collective
        flying = functional.all_reduce(torch.ones(3), "sum", group)
        dist.all_reduce(flying)
        assert flying.tolist() == [size * size] * 3


def _zero() -> None:
    """ZeroRedundancyOptimizer broadcasts pieces of its state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with world() as (rank, _size):
        plain, sharded = DistributedDataParallel(model()), DistributedDataParallel(model())
        one = torch.optim.Adam(plain.parameters(), lr=0.01)
        other = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.Adam, lr=0.01)
        for _ in range(2):
            for net, optimizer in ((plain, one), (sharded, other)):
                optimizer.zero_grad()
                net(batch(rank)).square().mean().backward()
                optimizer.step()
        for got, want in zip(sharded.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("world_size", [2, slow(3)])
@pytest.mark.parametrize(
    "job", [_ddp, _ddp_unused, slow(_ddp_compiled), _sharded, _dtensor, _zero], ids=lambda job: job.__name__[1:]
)
def test_training(run_ranks: Callable[..., list[Any]], job: Callable[[], None], world_size: int) -> None:
    if job is _sharded and torch.__version__ < "2.7":
        pytest.skip("FSDP2 of torch 2.6 asks the CPU's streams for events, which they have not")
    run_ranks(job, world_size)
