"""Idioms that touch weights, in stage 3 on (simulated) devices: as with torch, wherever the shards are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import simulated
import zcomm
from device_jobs import Job
from test_device_peers import DELAY_S, ranks, seeding
from test_weight_idioms import IDIOMS, Idiom, Net, compare, data, plain, values
from tiers import long

pytestmark = pytest.mark.slow

SEEDED = {"init_functions"}  # by the process's generator, which ranks that are threads share
STEPS = 2


def ours(act: Idiom, folder: Path, job: Job, comm: zcomm.Communicator) -> tuple[Any, ...]:
    with seeding:
        torch.manual_seed(0)
        model = Net()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    how: dict[str, Any] = {"share_parameters": job.share_parameters, "bucket_mb": job.bucket_mb}
    opt = zcomm.ZeroOptimizer(model, sgd, stage=3, offload=job.place(False), nvme_path=folder, comm=comm, **how)
    seen, losses = [], []
    for step in range(STEPS):
        seen.append(values(act(model, step)))
        x, y = data(step, comm.rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    opt.close()
    return seen, losses, weights


JOBS = [
    Job(3, "cpu", bucket_mb=25.0), Job(3, "cpu", share_parameters=False), Job(3, "nvme"),
    Job(3, None, resident=True), Job(3, "mixed", mixed=True),
]  # fmt: skip


in_pairs = [(job, 2) if job == JOBS[-1] else long(job, 2) for job in JOBS]


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(("job", "world_size"), [(JOBS[0], 1), long(JOBS[-1], 1), *in_pairs])
def test_idioms_are_as_with_torch(job: Job, world_size: int, tmp_path: Path) -> None:
    simulated.play(DELAY_S, joins=True)
    close = {"rtol": 2e-5, "atol": 2e-6}
    for name, act in IDIOMS.items():
        if name in SEEDED:
            continue
        folder = tmp_path / name
        folder.mkdir()

        def body(comm: zcomm.Communicator, act: Idiom = act, folder: Path = folder) -> Any:
            return ours(act, folder, job, comm)

        found = ranks(world_size, folder, body)
        seen, losses, weights = plain(act, world_size, STEPS)
        for rank, got in enumerate(found):
            where = f"{name} on rank {rank}"
            compare(got[1], [each[rank] for each in losses], where, close)
            compare(got[2], weights, where, close)
            compare(got[0], seen, where, close)
