"""Looks and edits that are documented as local stay local when an update waits for the next forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zcomm
from zcomm.zero import Offload
from zcomm.zero.tensors import local_shard
from zero_jobs import digest


def looked_at_alone(folder: str, offload: Offload) -> str:
    """Let only one rank look and edit between ``step()`` and the next forward. Return the digest of the end."""
    comm = zcomm.init(timeout=60)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    opt = zcomm.ZeroOptimizer(net, "adamw", stage=3, offload=offload, nvme_path=folder, lr=0.1)
    for number in range(4):
        net(torch.full((2, 64), number + comm.rank + 1.0)).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if comm.rank == number % 2:
            assert opt.memory() and opt.stats() and opt.state is not None and opt.step_count == number + 1
            for param in net.parameters():
                assert local_shard.own_param(param).isfinite().all()
                value = local_shard.own_optim_state(param, "exp_avg")
                local_shard.set_own_optim_state(param, 0.5 * value, "exp_avg")
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    found = digest({**opt.full_state_dict(), **arrays})
    opt.close()
    return found


def look_in_each(folder: str) -> None:
    wanted = looked_at_alone(folder, Offload("nvme", "nvme", update="step"))
    assert looked_at_alone(folder, Offload("nvme", "nvme", update="forward")) == wanted
    assert looked_at_alone(folder, Offload("nvme", "nvme", gradients="nvme", update="backward")) == wanted
    assert looked_at_alone(folder, Offload("nvme", "nvme", update="forward", atomic=True)) == wanted


def test_a_late_update_makes_no_local_look_collective(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(look_in_each, 2, str(tmp_path))
