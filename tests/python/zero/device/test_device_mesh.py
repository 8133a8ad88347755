"""Hybrid shards (ZeroOptimizer(mesh=)) of models on (simulated) devices: the bits of the same mesh on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job, train
from test_corners import Net, loss_of
from thread_world import ranks
from tiers import one_in
from zero_jobs import digest

DELAY_S = 0.0005
seeding = threading.Lock()


def played(world_size: int, folder: Path, body: Callable[[zcomm.Communicator], Any]) -> list[Any]:
    simulated.play(DELAY_S)
    try:
        return ranks(world_size, folder, body)
    finally:
        simulated.stop()


JOBS = [
    Job(0, "cpu"), Job(0, None, precision="bf16", clip=1.0, accum=2), Job(1, "cpu", precision="bf16", accum=2),
    Job(1, None, clip=0.5), Job(2, "cpu", bucket_mb=25.0), Job(2, "mixed", clip=0.5, accum=3),
    Job(2, "nvme", precision="bf16"), Job(2, "cpu", share_parameters=False, overlap=False),
    Job(2, "cpu", behind=True, precision="bf16"), Job(2, "cpu", behind=True, clip=0.5), Job(2, fraction=0.5),
    Job(2, None, optimizer="8bit"), Job(3, "cpu", precision="bf16", clip=0.5, accum=2),
    Job(3, "cpu", share_parameters=False), Job(3, None, resident=True), Job(3, "nvme", gradients="nvme"),
    Job(3, "nvme", gradients="nvme", update="backward"), Job(3, "mixed", mixed=True, precision="fp16"),
    Job(3, "cpu", behind=True), Job(3, "cpu", optimizer="lamb"), Job(2, "cpu", gradients="nvme"),
]  # fmt: skip
SIZES = [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}, {"replicate": 1, "shard": 2, "sequence": 2}]


@pytest.mark.parametrize(("mesh", "job"), one_in(8, 3, [(mesh, job) for mesh in SIZES for job in JOBS]), ids=str)
def test_the_bits_of_the_same_mesh_on_the_cpu(mesh: dict[str, int], job: Job, tmp_path: Path) -> None:
    def body(job: Job, comm: zcomm.Communicator) -> dict[str, Any]:
        return train(job, str(tmp_path), 4, comm, zcomm.ProcessMesh(comm, **mesh))

    world_size = mesh["replicate"] * mesh["shard"] * mesh.get("sequence", 1)
    plain = ranks(world_size, tmp_path, partial(body, job.plain))
    there = played(world_size, tmp_path, partial(body, job))
    assert there == plain
    assert len({each["bits"] for each in there}) == 1
    assert len(set(plain[0]["losses"])) == len(plain[0]["losses"])


def program(job: Job, folder: Path, comm: zcomm.Communicator) -> list[Any]:
    """Read and change gradients and weights between passes and steps, save, load into another mesh."""
    with seeding:
        torch.manual_seed(comm.rank)
        net = Net("plain")
    opt = job.build(net, str(folder), comm, zcomm.ProcessMesh(comm, replicate=2, shard=2))
    weight, found = net.embed.weight, []
    for number in range(6):
        opt.backward(loss_of(net, comm.rank, number))
        if number in (1, 2):  # after the last pass of a step, and after its first
            found.append(digest({"gradient": zcomm.zero.full_grad(weight)}))
        if number == 3:
            zcomm.zero.set_full_param(weight, 0.5 * zcomm.zero.full_param(weight))
        opt.step()
        opt.zero_grad()
        if number == 3:
            opt.save(folder / "saved")
    found.append(digest(opt.full_state_dict()))
    opt.close()
    net = Net("plain")
    loaded = job.build(net, str(folder), comm, zcomm.ProcessMesh(comm, replicate=1, shard=4))
    loaded.load(folder / "saved")
    for number in (4, 5):
        loaded.backward(loss_of(net, comm.rank, number))
        loaded.step()
        loaded.zero_grad()
    found.append(float(loaded.grad_norm).hex())
    loaded.close()
    return found


@pytest.mark.parametrize(
    "job", [Job(2, "cpu", accum=2, clip=0.5), Job(3, "cpu", accum=2, share_parameters=False)], ids=str
)
def test_programs_that_look_and_change(job: Job, tmp_path: Path) -> None:
    plain = ranks(4, tmp_path, partial(program, job, tmp_path))
    assert played(4, tmp_path, partial(program, job, tmp_path)) == plain
    assert all(each == plain[0] for each in plain)


def test_forms_that_are_refused(tmp_path: Path) -> None:
    forms: dict[str, dict[str, Any]] = {
        "hpz=True": {"mesh": {"replicate": 2, "shard": 2}, "stage": 3, "hpz": True},
        "an axis with other tensors": {"mesh": {"tensor": 2, "shard": 2}},
        "codecs run on the host": {
            "mesh": {"replicate": 2, "shard": 2},
            "compression": zcomm.Compression(gradients="int8"),
        },
        "memory=": {"mesh": {"replicate": 2, "shard": 2}, "memory": "1GiB"},
    }

    def body(comm: zcomm.Communicator) -> None:
        for text, form in forms.items():
            mesh = zcomm.ProcessMesh(comm, **form["mesh"])
            with pytest.raises((NotImplementedError, ValueError), match=text):
                zcomm.ZeroOptimizer(Net("plain"), "adamw", comm=comm, **{**form, "mesh": mesh})

    played(4, tmp_path, body)
