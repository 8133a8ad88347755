"""Several ranks that train on GPUs which reach each other, or on one: the bits of the way by the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import zcomm
from device_jobs import Job
from test_corners import Net, tokens_of
from zcomm.backends import cuda_ipc
from zcomm.memory.device_streams import NO_PEERS
from zero_jobs import digest

DEVICES = torch.cuda.device_count() if zcomm._core.cuda_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICES == 0, reason="no CUDA device here")]
STEPS = 6

JOBS = [
    Job(0, None), Job(1, None), Job(2, None, bucket_mb=25.0), Job(2, fraction=0.5), Job(3, None, resident=True),
    Job(3, None, resident=True, prefetch=0), Job(3, None, resident=True, prefetch=3, accum=2), Job(2, None, accum=2),
    Job(3, "cpu", resident=True), Job(3, "mixed", mixed=True),
]  # fmt: skip


def train(job: Job, folder: str, by: str = "cuda_ipc") -> tuple[bool, str]:
    """Return whether anything was moved between devices, and the bits of the weights. by: joins the devices."""
    comm = zcomm.init(timeout=60)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    device = f"cuda:{comm.local_rank % DEVICES}"
    net = Net("plain").to(device)
    with mock.patch.object(cuda_ipc, "beside", return_value=None) if by == "nccl" else nullcontext():
        opt = job.build(net, folder)
    for number in range(STEPS * job.accum):
        tokens = tokens_of(comm.rank, number).to(device)
        opt.backward(F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()))
        opt.step()
        opt.zero_grad()
    parts = opt._parts
    joins = {parts.comms.peers, parts.store.peers} - {NO_PEERS}  # the store's if only weights are resident on devices
    moved = {comm.backend for comm in joins} == {by}
    found = moved, digest(opt.full_state_dict())
    opt.close()
    return found


def jobs_and_references(precision: str, clip: float | None, folder: str, by: str) -> list[tuple[bool, bool]]:
    """Return of each job whether it moved between devices, and whether its bits are those of the way by the host."""
    same = {"precision": precision, "clip": clip}
    by_host = {accum: train(Job(2, accum=accum, **same), folder)[1] for accum in (1, 2)}
    found = [(job.accum, train(Job(**{**vars(job), **same}), folder, by)) for job in JOBS]
    zcomm.shutdown()
    return [(moved, bits == by_host[accum]) for accum, (moved, bits) in found]


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("precision", "clip"), [("fp32", None), ("bf16", 0.5), ("fp16", None)])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_bits_of_the_host(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int, precision: str, clip: float | None
) -> None:
    if not all(torch.cuda.can_device_access_peer(0, other) for other in range(1, DEVICES)):
        pytest.skip("the devices of this machine do not reach each other")
    for rank in run_ranks(jobs_and_references, world_size, precision, clip, str(tmp_path), "cuda_ipc", timeout_s=280):
        assert rank == [(True, True)] * len(JOBS)


@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(("precision", "clip"), [("fp32", None), ("bf16", 0.5)])
def test_the_bits_of_the_host_over_nccl(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, precision: str, clip: float | None
) -> None:
    if DEVICES < 2:
        pytest.skip("NCCL needs a device for each rank")
    for rank in run_ranks(jobs_and_references, 2, precision, clip, str(tmp_path), "nccl", timeout_s=280):
        assert rank == [(True, True)] * len(JOBS)
