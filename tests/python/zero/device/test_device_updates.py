"""Sums of gradients on a drive, and updates in forward and backward, for a model on a (simulated) device.

The oracle is the same training on the CPU with sums in RAM and updates in step(), to the bit. Ranks are threads.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import test_device_peers
import zcomm
from device_jobs import Job
from test_corners import AGAIN, KINDS, Net, loss_of
from test_device_peers import compare, ranks
from tiers import long, one_in
from zcomm.zero import assemble
from zcomm.zero.cache.swap import SCRATCH, Swap
from zcomm.zero.gradients.last_pass import LastPassTransport
from zcomm.zero.layout.flat import FlatBucket

DRIVE = Job(3, "nvme", gradients="nvme")
FORWARD, BACKWARD = (replace(DRIVE, update=update) for update in ("forward", "backward"))
JOBS = [
    DRIVE, replace(DRIVE, precision="bf16", clip=0.5, accum=2), replace(DRIVE, stage=2, clip=0.5),
    replace(DRIVE, stage=1, accum=2, overlap=False), replace(DRIVE, offload="cpu", resident=True, precision="bf16"),
    replace(DRIVE, offload="mixed", mixed=True, clip=0.5), replace(DRIVE, fraction=0.5, prefetch=0),
    FORWARD, replace(FORWARD, gradients=None), replace(FORWARD, gradients=None, offload="cpu", prefetch=3),
    replace(FORWARD, precision="fp16", accum=2, clip=0.5), replace(FORWARD, share_parameters=False, prefetch=0),
    BACKWARD, replace(BACKWARD, precision="bf16", prefetch=0), replace(BACKWARD, overlap=False, prefetch=3),
    replace(BACKWARD, offload="cpu"), replace(BACKWARD, max_bytes=4800), replace(BACKWARD, optimizer="lion"),
    replace(DRIVE, update="auto"), replace(DRIVE, update="auto", fraction=0.5), replace(BACKWARD, atomic=True),
    replace(FORWARD, atomic=True, precision="fp16"), replace(BACKWARD, atomic=True, precision="fp16"),
    replace(DRIVE, atomic=True, clip=0.5), replace(FORWARD, atomic=True, gradients=None, offload="cpu"),
]  # fmt: skip


@pytest.mark.parametrize("job", one_in(4, 0, JOBS), ids=str)
def test_the_bits_of_the_cpu(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path, 2, 6)


@pytest.mark.parametrize("job", one_in(2, 1, JOBS[::2]), ids=str)
def test_the_bits_of_the_cpu_on_one_rank(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path, 1, 6)


@pytest.mark.parametrize(("cores", "pool", "threads"), [(16, 16, 14), (2, 2, 1), (16, 8, 8), (4, 4, 2)])
def test_updates_leave_two_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, pool: int, threads: int
) -> None:
    """The thread that issues kernels has a core while updates run. On the CPU an update has all cores."""
    monkeypatch.setattr(assemble.os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(assemble._core, "threads", lambda: pool)
    used: dict[bool, list[int]] = {True: [], False: []}
    for on_device, seen in used.items():
        simulated.play() if on_device else simulated.stop()
        opt = Job(2).build(net := Net("plain"), str(tmp_path))
        kernel = opt._train.rule._kernel
        opt._train.rule._kernel = lambda *args, seen=seen, kernel=kernel: (seen.append(args[2]), kernel(*args))
        opt.backward(loss_of(net, 0, 0))
        opt.step()
        opt.close()
    assert set(used[True]) == {threads} and set(used[False]) == {0}


def test_updates_wait_for_gradients_that_come_after_the_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a world of one the squares are computed on the device, before the gradients are in host memory."""
    start, waits = LastPassTransport.start, []

    def late(self: LastPassTransport, bucket: FlatBucket, accumulate: bool) -> None:
        if bucket.index != 0:
            start(self, bucket, accumulate)
            return
        slow = simulated.device(1, 0.5)  # the last bucket of a pass, and the first that is updated
        stream, event = slow.make_stream(), slow.make_event()
        stream.record(event)
        waits.append(stream)
        ready, self._weights_ready = self._weights_ready, event  # its copy to the host begins after that
        start(self, bucket, accumulate)
        self._weights_ready = ready

    monkeypatch.setattr(LastPassTransport, "start", late)
    compare(Job(3, "cpu", update="forward", prefetch=0), tmp_path, 1)
    assert len(waits) == 4


@pytest.mark.parametrize("stage", [1, 3])
def test_sums_on_the_drive_are_read_once_where_the_norm_decides_nothing(
    tmp_path: Path, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count the reads of each sum in the last step: other reads depend on the content of windows."""
    simulated.play(0.0)
    reads, read = Counter[str](), Swap.read_place

    def counted(self: Swap, place: str, ptr: int, nbytes: int) -> Any:
        reads[place] += place.startswith(SCRATCH)
        return read(self, place, ptr, nbytes)

    monkeypatch.setattr(Swap, "read_place", counted)

    def body(comm: zcomm.Communicator) -> list[dict[str, int]]:
        found = []
        for clip in (None, 1e9):
            net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
            opt = replace(DRIVE, stage=stage, clip=clip).build(net, str(tmp_path), comm)
            for number in range(4):
                reads.clear()
                opt.backward(net(torch.ones(2, 64) * (number + 1)).square().mean())
                opt.step()
                opt.zero_grad()
                opt._parts.swap.wait()
            found.append({place: count for place, count in reads.items() if count})
            opt.close()
        return found

    for found in ranks(1, tmp_path, body)[0]:
        assert found and max(found.values()) == 1, found


def test_updates_run_where_they_are_wanted(tmp_path: Path) -> None:
    simulated.play(test_device_peers.DELAY_S, joins=True)

    def body(comm: zcomm.Communicator) -> list[tuple[bool, bool]]:
        found = []
        for job in (FORWARD, BACKWARD):
            net = Net("plain")
            opt = job.build(net, str(tmp_path), comm)
            for number in range(4):
                opt.backward(loss_of(net, comm.rank, number))
                found.append((opt._parts.updates.pending, opt._parts.updates.waits))
                opt.step()
                opt.zero_grad()
                assert opt._parts.updates.waits == (job is FORWARD or number < 2)
            assert opt._parts.reducer.accumulators.on_drive
            opt.close()
        return found

    forward, backward = [(False, False)] * 4, [(False, False)] * 2 + [(True, False)] * 2
    assert ranks(2, tmp_path, body) == [forward + backward] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(6, 1, KINDS[1:], long))
def test_models_off_the_straight_road(kind: str, tmp_path: Path) -> None:
    last = FORWARD if kind in (*AGAIN, "outside") else BACKWARD
    for job in (DRIVE, FORWARD, replace(last, prefetch=0)):
        compare(replace(job, kind=kind), tmp_path, 2, 6)
        simulated.stop()
