"""An episode of process groups: created, joined by ranks with fewer batches, destroyed and created by late ranks.

Each group has its own store, without keys of the previous group. DDP's weights must equal plain torch's in one
process, which averages the gradients of the ranks that still have batches, or divides by all.
"""

from __future__ import annotations

import random
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from soaking.plan import Episode

_LATE_S = 0.2
_CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def play(episode: Episode, comm: Any) -> str:
    """Play the episode on this rank; return its failure as text, or ""."""
    import zcomm.torch_backend  # noqa: F401

    pick, where = random.Random(episode.seed), f"tcp://127.0.0.1:{_port(comm)}"
    try:
        for number in range(pick.randrange(2, 4)):
            late, late_for = pick.randrange(comm.world_size), pick.choice(("", "destroy", "next"))
            counts = [pick.randrange(1, 5) for _ in range(comm.world_size)]
            divides, shift = pick.random() < 0.5, pick.randrange(comm.world_size)
            rank = (comm.rank + shift) % comm.world_size
            dist.init_process_group("zcomm", where, timedelta(seconds=30), rank=rank, world_size=comm.world_size)
            store = dist.distributed_c10d._get_default_store()
            if store.check(["number"]):
                return f"group {number} has the store of an earlier group"
            found, wanted = _trained(counts, divides, rank), _trained(counts, divides, None)
            dist.barrier()
            store.set("number", str(number))
            del store
            if late_for == "destroy" and rank == late:
                time.sleep(_LATE_S)
            dist.destroy_process_group()
            if late_for == "next" and rank == late:
                time.sleep(_LATE_S)
            if not torch.allclose(found, wanted, **_CLOSE):
                return f"group {number}: DDP joined with {counts} batches is {float((found - wanted).norm()):.3g} away"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return ""


def _port(comm: Any) -> int:
    """Return a port that is free on rank 0's host. Collective."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        told = torch.tensor([probe.getsockname()[1]], dtype=torch.int64)
    comm.broadcast(told, 0)
    return int(told)


def _trained(counts: list[int], divides: bool, own: int | None) -> torch.Tensor:
    """Return the weights after each rank's number of batches. own: of this rank of DDP; None: of plain torch."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def backward(model: nn.Module, rank: int, step: int) -> None:
        model(torch.ones(3, 4, dtype=torch.float64) * (1 + step + rank)).square().mean().backward()

    if own is not None:
        model = nn.parallel.DistributedDataParallel(net)
        with model.join(divide_by_initial_world_size=divides):
            for step in range(counts[own]):
                optimizer.zero_grad()
                backward(model, own, step)
                optimizer.step()
    for step in range(max(counts) if own is None else 0):
        optimizer.zero_grad()
        active = [rank for rank, count in enumerate(counts) if step < count]
        for rank in active:
            backward(net, rank, step)
        for param in net.parameters():
            assert param.grad is not None
            param.grad /= len(counts) if divides else len(active)
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in net.parameters()])
