"""Gradients of one rank on their way to the host, on a GPU: used up in backward, added by the update, summed there.

The bits are those of the same program with updates in step(), and so of the CPU (test_gpu.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zcomm
from device_jobs import Job
from test_corners import Net
from test_gpu import loss_of, train
from zcomm.zero.gradients import pinned
from zcomm.zero.gradients.used_up import UsedUpTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not zcomm._core.cuda_available(), reason="no CUDA device here"),
]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_of_gradients_that_are_used_up(
    tmp_path: Path, precision: str, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """few: three host slots, so that backward waits for updates."""
    if few:
        monkeypatch.setattr(pinned, "HOST_SLOTS_NBYTES", 1)
    reference = train(Job(2, precision=precision), str(tmp_path))
    used_up = Job(2, precision=precision, update="backward")
    for job in (used_up, replace(used_up, stage=0, offload="nvme"), replace(used_up, fraction=0.5)):
        assert train(job, str(tmp_path)) == reference, f"{job}"
    zcomm.shutdown()


def test_host_memory_is_12_bytes_per_parameter(tmp_path: Path) -> None:
    net = Net("plain").cuda()
    opt = Job(2, precision="bf16", update="backward").build(net, str(tmp_path))
    assert isinstance(opt._parts.reducer.accumulators.kinds[0], UsedUpTransport)
    for number in range(3):
        opt.backward(loss_of(net, number))
        with pytest.raises(RuntimeError, match="call step"):
            opt.zero_grad()
        opt.step()
        opt.zero_grad()
    memory, count = opt.memory()["cpu"], sum(bucket.count for bucket in opt._parts.geometry.buckets)
    assert memory["parameters"] + memory["optimizer"] == 12 * count and memory["gradients"] == 0
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("accum", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_bits_of_the_last_pass(tmp_path: Path, precision: str, accum: int) -> None:
    """The update in step() reads the last gradients in their slots; behind the forward backward adds all passes."""
    job = Job(2, precision=precision, accum=accum)
    reference = train(job, str(tmp_path), behind=True)
    for other in (job, replace(job, stage=3), replace(job, stage=3, update="forward")):
        assert train(other, str(tmp_path)) == reference, f"{other}"
    zcomm.shutdown()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("edits", [False, True])
def test_the_bits_of_sums_on_the_device(tmp_path: Path, precision: str, clip: float | None, edits: bool) -> None:
    job = Job(2, accum=3, precision=precision, clip=clip)
    reference = train(job, str(tmp_path), edits=edits)
    there = replace(job, gradients="device")
    for other, behind in ((there, False), (there, True), (replace(there, stage=3, update="forward"), False)):
        assert train(other, str(tmp_path), behind, edits=edits) == reference, f"{other} {behind}"
    zcomm.shutdown()
