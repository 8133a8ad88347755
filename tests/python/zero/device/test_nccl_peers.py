"""Training of several ranks with (simulated) devices that NCCL joins: resident buckets are reduced between devices.

Ranks are threads, over a stand-in for NCCL. The oracle is the same training on the CPU, to the bit.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
import zcomm_testing
from device_jobs import Job, train
from test_corners import Net, loss_of
from thread_world import ranks
from tiers import one_in
from zcomm.backends import cuda_ipc, devices
from zcomm.backends import nccl as nccl_backend
from zcomm.memory.device_streams import NO_PEERS

DELAY_S = 0.0005
seeding = threading.Lock()


@pytest.fixture(name="nccl")
def _nccl() -> Iterator[zcomm_testing.FakeNccl]:
    nccl = zcomm_testing.FakeNccl()
    before = nccl.complaints
    yield nccl
    simulated.stop()  # its lanes have the stand-in, and there is one at a time
    gc.collect()
    assert nccl.complaints == before  # standard error has them


JOBS = [
    Job(0, None), Job(0, None, precision="bf16", clip=1.0, accum=2), Job(0, "mixed", overlap=False),
    Job(1, None, precision="fp16", accum=3), Job(1, "mixed", clip=0.5),
    Job(2, None, clip=0.5), Job(2, None, precision="bf16", accum=2), Job(2, None, bucket_mb=25.0),
    Job(2, "mixed", share_parameters=False, precision="bf16"), Job(2, fraction=0.5, behind=True),
    Job(3, None, resident=True), Job(3, None, resident=True, precision="bf16", clip=0.5, prefetch=0),
    Job(3, None, resident=True, accum=3, prefetch=3), Job(3, None, resident=True, precision="fp16", overlap=False),
    Job(3, "mixed", mixed=True), Job(2, None, optimizer="8bit"), Job(3, None, optimizer="adagrad", resident=True),
]  # fmt: skip


@pytest.mark.parametrize("job", one_in(4, 1, JOBS), ids=str)
def test_the_bits_of_the_cpu(job: Job, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    def body(job: Job, comm: zcomm.Communicator) -> dict[str, Any]:
        return train(job, str(tmp_path), 4, comm)

    plain = ranks(2, tmp_path, partial(body, job.plain))
    simulated.play(DELAY_S, nccl=nccl)
    there = ranks(2, tmp_path, partial(body, job))
    assert there == plain
    assert there[0]["bits"] == there[-1]["bits"]
    assert len(set(plain[0]["losses"])) == len(plain[0]["losses"])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_crosses_the_host(stage: int, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    simulated.play(DELAY_S, nccl=nccl)

    def body(comm: zcomm.Communicator) -> None:
        net = Net("plain")
        opt = Job(stage, None, resident=True).build(net, str(tmp_path), comm)
        assert sum(opt.memory()["cpu"].values()) == 0
        parts = opt._parts
        assert isinstance(parts.comms.peers, zcomm.Communicator) and parts.comms.peers.backend == "nccl"
        assert parts.store.peers is (parts.comms.peers if stage == 3 else NO_PEERS)  # one order on a device
        host, moved = parts.comm._core, []

        class Watched:
            """The host's communicator, which records collectives of gradients or weights."""

            def __getattr__(self, name: str) -> Any:
                if name in ("reduce_scatter", "all_gather"):
                    moved.append(name)
                return getattr(host, name)

        parts.comm._core = Watched()
        for number in range(3):
            opt.backward(loss_of(net, comm.rank, number))
            opt.step()
            opt.zero_grad()
        assert moved == []
        parts.comm._core = host
        opt.close()

    ranks(2, tmp_path, body)


class _Pair(torch.nn.Module):
    """Two equal blocks, in the order of ``names``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.names = ["a", "b"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = getattr(self, name)(x).tanh()
        return x.square().mean()


def test_ranks_that_use_modules_in_another_order_are_named(nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    """Their gathers end well, with wrong weights: no checkpoint gets them, and two updates at most."""
    simulated.play(nccl=nccl)

    def body(comm: zcomm.Communicator) -> None:
        net = _Pair()
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3, units=[net.a, net.b], comm=comm)
        assert opt._parts.store.peers.backend == "nccl"
        for number in range(6):
            if number == 2 and comm.rank == 1:
                net.names.reverse()
            try:
                opt.backward(net(torch.ones(4, 64)))
                opt.step()
            except zcomm.CollectiveMismatch as error:
                words = str(error)
                break
            opt.zero_grad()
        assert "ranks called different operations" in words and "all_gather" in words and 2 <= number <= 4
        with pytest.raises((zcomm.CollectiveMismatch, RuntimeError)):
            opt.save(tmp_path / "c")
        with pytest.raises((zcomm.CollectiveMismatch, RuntimeError)):
            opt.step()
        assert not (tmp_path / "c").exists()
        opt.close()

    ranks(2, tmp_path, body)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_job_of_backend_nccl(stage: int, nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    """Such a job moves no tensors in host memory: the optimizer has communicators of its own."""
    job = Job(stage, None, precision="bf16", clip=0.5, resident=True)

    def on_host(comm: zcomm.Communicator) -> Any:
        return train(job, str(tmp_path), 3, comm)

    def on_nccl(comm: zcomm.Communicator) -> Any:
        control = comm.duplicate()._joined
        there = zcomm.Communicator(simulated.over_nccl(nccl, control, simulated.device(7, DELAY_S)))
        found = train(job, str(tmp_path), 3, there)
        with pytest.raises(NotImplementedError, match="mesh= with backend 'nccl'"):
            zcomm.ZeroOptimizer(Net("plain"), "adamw", comm=there, mesh=zcomm.ProcessMesh(there, data=2))
        there.close()
        return found

    plain = ranks(2, tmp_path, on_host)
    simulated.play(DELAY_S, nccl=nccl)
    assert ranks(2, tmp_path, on_nccl) == plain


def test_a_rank_that_ends_ends_the_others(nccl: zcomm_testing.FakeNccl, tmp_path: Path) -> None:
    simulated.play(nccl=nccl)

    def body(comm: zcomm.Communicator) -> str:
        net = Net("plain")
        opt = Job(2, None).build(net, str(tmp_path), comm)
        for number in range(4):
            if number == 2 and comm.rank == 1:
                opt.close()
                return ""
            try:
                opt.backward(loss_of(net, comm.rank, number))
                opt.step()
            except (zcomm.PeerLost, RuntimeError) as error:
                opt.close()
                return f"{type(error).__name__} {error}"
            opt.zero_grad()
        return "no error"

    assert "rank 1 left" in ranks(2, tmp_path, body)[0]


def test_devices_that_nccl_cannot_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Each reason is logged once, and all ranks go by way of the host."""
    device, uuid = torch.device("cuda", 0), {0: b"a", 1: b"b"}
    monkeypatch.setattr(cuda_ipc, "beside", lambda *args: None)
    monkeypatch.setattr(nccl_backend, "uuids", lambda job, index: [uuid[0], uuid[1]])
    monkeypatch.setattr(nccl_backend, "is_there", lambda: True)

    def beside(comm: zcomm.Communicator) -> Any:
        found = devices.beside(comm, None, device)  # type: ignore[arg-type]
        comm.barrier()  # the communicator is as good as before
        return found

    def refusal() -> str:
        caplog.clear()
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        assert ranks(2, folder, beside) == [None, None]
        return "\n".join(record.getMessage() for record in caplog.records)

    for reason, change in {
        "libnccl is not there": lambda: monkeypatch.setattr(nccl_backend, "is_there", lambda: False),
        "up to 1": lambda: monkeypatch.setattr(nccl_backend, "MOST_RANKS", 1),
        "ranks share a device": lambda: uuid.update({1: b"a"}),
    }.items():
        change()
        assert refusal().count(reason) == 1


def test_first_weights_go_between_devices(
    nccl: zcomm_testing.FakeNccl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulated.play(DELAY_S, nccl=nccl)
    sent: list[tuple[str, str]] = []
    broadcast = zcomm.Communicator.broadcast

    def told(self: zcomm.Communicator, *args: Any, **options: Any) -> Any:
        sent.append((self.backend, options["name"]))
        return broadcast(self, *args, **options)

    monkeypatch.setattr(zcomm.Communicator, "broadcast", told)

    def body(comm: zcomm.Communicator) -> None:
        Job(3, None, resident=True).build(Net("plain"), str(tmp_path), comm).close()

    ranks(2, tmp_path, body)
    assert {backend for backend, name in sent if name.startswith("weights ")} == {"nccl"}
