"""Other features on a GPU, one small test each: pinned memory, activations, torch's backend, ranks that share it.

Each body also runs with the CPU as the device ("played"), so that a GPU run differs only in the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import simulated
import zcomm
from device_jobs import Job
from test_activations import gradients, made
from test_corners import Net, tokens_of
from torch_world import world
from zcomm import _core
from zero_jobs import digest

HERE = torch.cuda.is_available() and _core.cuda_available()
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HERE, reason="needs a CUDA device, and a build and a torch with CUDA"),
]
WHERE = ["played", pytest.param("cuda", marks=ON_GPU)]
Run = Callable[..., list[Any]]


@pytest.mark.parametrize("where", WHERE)
def test_memory_that_is_pinned(where: str, tmp_path: Path) -> None:
    """Torch sees pinned memory once CUDA is initialized; optimizer state never crosses the bus, so it is not pinned."""
    on_gpu = where == "cuda"
    if HERE:
        torch.zeros(1, device="cuda")
    for count in (1, 4097, 1 << 20):
        memory = zcomm.pinned_empty(count, torch.bfloat16)
        assert memory.is_pinned() == HERE and not memory.any()
        there = memory.fill_(2).to("cuda" if on_gpu else "cpu", non_blocking=True)
        assert float(there.float().sum()) == 2 * count
    if not on_gpu:
        simulated.play()
    zcomm.init()
    net = Net("plain").cuda() if on_gpu else Net("plain")
    opt = Job(2).build(net, str(tmp_path))
    assert not any(state.is_pinned() for state in opt._parts.state.kinds[0]._states)
    assert opt._parts.store._host._flat.is_pinned() == on_gpu, "from where weights go to the device"
    opt.close()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("recompute", ["no", "checkpoint"])
def test_activations_that_are_offloaded(where: str, tier: str, recompute: str, tmp_path: Path) -> None:
    net, x = made(recompute)
    if where == "cuda":
        net, x = net.cuda(), x.detach().cuda().requires_grad_()
    else:
        simulated.play(0.0005)
    plain = gradients(net, x)
    offload = zcomm.offload_activations(tier, min_nbytes=1024, nvme_path=tmp_path)
    for _ in range(4):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(net, x, offload), strict=True))
    assert offload.stats()["offloaded_nbytes"] == 0
    offload.close()


def torch_calls(where: str) -> None:
    device = torch.device("cuda" if where == "cuda" else "cpu")
    with world() as (rank, size):
        tensor = torch.full((70_003,), float(rank + 1), device=device)
        dist.all_reduce(tensor)
        assert tensor.eq(size * (size + 1) / 2).all()
        whole = torch.empty(size * 5, device=device)
        dist.all_gather_into_tensor(whole, torch.full((5,), float(rank), device=device))
        assert whole.view(size, 5)[:, 0].tolist() == list(range(size))
        part = torch.empty(5, device=device)
        dist.reduce_scatter_tensor(part, torch.ones(5 * size, device=device))
        assert part.eq(size).all()
        dist.broadcast(whole, src=size - 1)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(20, 33), nn.ReLU(), nn.Linear(33, 4)).to(device)
        ours, batches = DistributedDataParallel(net), torch.randn(size, 8, 20).to(device)
        ours(batches[rank]).square().mean().backward()
        found = [weight.grad.clone() for weight in net.parameters() if weight.grad is not None]
        net.zero_grad()
        (sum(net(batch).square().mean() for batch in batches) / size).backward()  # type: ignore[union-attr]
        for got, weight in zip(found, net.parameters(), strict=True):
            torch.testing.assert_close(got, weight.grad, rtol=1e-4, atol=1e-5)
        dist.barrier()


@pytest.mark.parametrize("where", WHERE)
def test_torchs_own_backend(where: str, run_ranks: Run) -> None:
    run_ranks(torch_calls, 2, where, timeout_s=60)


def training(where: str, jobs: list[Job], folder: str) -> list[Any]:
    """Return losses and the bits of the weights of each job."""
    rank = zcomm.init(timeout=60).rank
    if where != "cuda":
        simulated.play(0.0005, seed=rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    ends = []
    for job in jobs:
        torch.manual_seed(0)
        net = Net("plain").cuda() if where == "cuda" else Net("plain")
        opt = job.build(net, folder)
        losses = []
        for number in range(4):
            tokens = tokens_of(rank, number).to(next(iter(opt.param_groups[0]["params"])).device)
            loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            opt.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item().hex())
        ends.append((losses, digest(opt.full_state_dict())))
        opt.close()
    return ends


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ranks_that_share_a_device_train(where: str, precision: str, run_ranks: Run, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": precision, "clip": 0.5}
    jobs = [Job(0, **options), Job(1, "nvme", **options), Job(2, **options), Job(2, None, **options)]
    jobs += [Job(3, **options), Job(3, share_parameters=False, **options)]
    first, second = run_ranks(training, 2, where, jobs, str(tmp_path))
    for of_rank in (first, second):
        for job, end in zip(jobs, of_rank, strict=True):
            assert end == of_rank[0], f"{job}"
    assert first[0][1] == second[0][1] and first[0][0] != second[0][0], "one model, another batch each"
