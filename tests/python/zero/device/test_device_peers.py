"""Training of several ranks with (simulated) devices that reach each other: resident buckets are reduced on devices.

Ranks are threads. The oracle is the same training on the CPU, to the bit; bytes that cross the host are counted.
"""

from __future__ import annotations

import errno
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
from device_jobs import Job, train
from test_corners import KINDS, Net, loss_of
from thread_world import ranks
from tiers import long, one_in
from zcomm.backends import cuda_ipc
from zcomm.bootstrap.join import Joined
from zcomm.memory.device_streams import NO_PEERS
from zcomm.zero.optim_state.device import DeviceState
from zcomm.zero.params.device import DeviceStore
from zcomm.zero.units.store import UnitStore
from zero_jobs import digest

DELAY_S = 0.0005
seeding = threading.Lock()
_plain: dict[tuple[Job, int, int], list[Any]] = {}  # results on the CPU


def compare(job: Job, folder: Path, world_size: int = 2, steps: int = 4) -> None:
    def body(job: Job, comm: zcomm.Communicator) -> dict[str, Any]:
        return train(job, str(folder), steps, comm)

    key = job.plain, world_size, steps
    if key not in _plain:
        _plain[key] = ranks(world_size, folder, partial(body, job.plain))
    plain = _plain[key]
    simulated.play(DELAY_S, joins=True)
    there = ranks(world_size, folder, partial(body, job))
    assert there == plain
    assert there[0]["bits"] == there[-1]["bits"]
    assert len(set(plain[0]["losses"])) == len(plain[0]["losses"])


JOBS = [
    Job(0, None), Job(0, None, precision="bf16", clip=1.0, accum=2), Job(0, "mixed", overlap=False),
    Job(1, None), Job(1, None, precision="fp16", accum=3), Job(1, "mixed", clip=0.5),
    Job(2, None), Job(2, None, clip=0.5), Job(2, None, precision="bf16", accum=2), Job(2, None, overlap=False),
    Job(2, None, bucket_mb=25.0), Job(2, None, share_parameters=False),
    Job(2, "mixed"), Job(2, "mixed", share_parameters=False, precision="bf16"), Job(2, fraction=0.5, clip=0.5),
    Job(2, fraction=0.5, behind=True), Job(0, fraction=0.5, behind=True, clip=0.5), Job(2, None, optimizer="lion"),
    Job(3, None, resident=True), Job(3, None, resident=True, precision="bf16", clip=0.5, prefetch=0),
    Job(3, None, resident=True, accum=3, prefetch=3), Job(3, None, resident=True, precision="fp16", overlap=False),
    Job(2, None, optimizer="8bit"), Job(2, None, optimizer="nadam"), Job(2, None, optimizer="asgd"),
    Job(2, None, optimizer="momentum", precision="fp16"), Job(3, None, optimizer="adagrad", resident=True),
]  # fmt: skip


@pytest.mark.parametrize("job", one_in(4, 1, JOBS), ids=str)
def test_the_bits_of_the_cpu(job: Job, tmp_path: Path) -> None:
    compare(job, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", one_in(3, 1, KINDS[1:], long))  # test_zero_device, test_device_mixed run the others
def test_models_off_the_straight_road(kind: str, tmp_path: Path) -> None:
    compare(Job(2, None, kind=kind), tmp_path)
    simulated.stop()
    compare(Job(3, None, kind=kind, resident=True), tmp_path)
    simulated.stop()
    compare(Job(3, None, kind=kind, resident=True, prefetch=0), tmp_path)
    compare(Job(3, None, kind=kind, resident=True, max_bytes=4800), tmp_path)


@pytest.mark.long
def test_three_ranks_and_many_late_steps(tmp_path: Path) -> None:
    compare(Job(2, None, clip=1.0), tmp_path, 3)
    simulated.stop()
    compare(Job(1, "mixed", accum=2), tmp_path, 2, 40)


def backward(net: torch.nn.Module, opt: Any, rank: int, number: int) -> None:
    opt.backward(loss_of(net, rank, number))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_crosses_the_host(stage: int, tmp_path: Path) -> None:
    simulated.play(joins=True)

    def body(comm: zcomm.Communicator) -> None:
        net = Net("plain")
        numel = sum(p.numel() for p in net.parameters())
        opt = Job(stage, None, resident=True).build(net, str(tmp_path), comm)
        sharded = numel // 2
        memory = opt.memory()
        assert sum(memory["cpu"].values()) == 0
        kept = sharded if stage == 3 else numel
        assert 4 * kept <= memory["device"]["parameters"] < 4.4 * kept
        assert 4 * sharded <= memory["device"]["gradients"] < 4.4 * sharded
        assert 8 * sharded <= memory["device"]["optimizer"] < 9.6 * sharded
        parts = opt._parts
        host = parts.comm._core
        assert isinstance(parts.store, UnitStore if stage == 3 else DeviceStore)
        moved: list[str] = []

        class Watched:
            """The host's communicator, which records collectives of gradients or weights."""

            def __getattr__(self, name: str) -> Any:
                if name in ("reduce_scatter", "all_gather"):  # a broadcast tells the launch order, once
                    moved.append(name)
                return getattr(host, name)

        parts.comm._core = Watched()
        counts = []
        for number in range(4):
            backward(net, opt, comm.rank, number)
            opt.step()
            opt.zero_grad()
            counts.append(opt.allocation_count())
        assert moved == [] and len(set(counts)) == 1
        parts.comm._core = host
        opt.close()

    ranks(2, tmp_path, body)


@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_go_from_and_to_the_cpu(stage: int, tmp_path: Path) -> None:
    """Saved on devices, also behind training, read on the CPU, and back: as if nothing had been saved."""

    def steps(net: torch.nn.Module, opt: Any, rank: int, first: int, last: int) -> str:
        for number in range(first, last):
            backward(net, opt, rank, number)
            opt.step()
            opt.zero_grad()
        return digest(opt.full_state_dict())

    def body(comm: zcomm.Communicator) -> tuple[str, str, str]:
        with seeding:
            torch.manual_seed(0)
            nets = [Net("plain") for _ in range(3)]
        job = Job(stage, None, precision="bf16", resident=True)
        there = job.build(nets[0], str(tmp_path), comm)
        steps(nets[0], there, comm.rank, 0, 3)
        saving = there.save(tmp_path / "c", wait=False)
        steps(nets[0], there, comm.rank, 3, 4)
        saving.wait()
        first = steps(nets[0], there, comm.rank, 4, 6)
        comm.barrier()
        if comm.rank == 0:
            simulated.stop()
        comm.barrier()
        here = job.build(nets[1], str(tmp_path), comm)
        here.load(tmp_path / "c", random=False)
        second = steps(nets[1], here, comm.rank, 3, 6)
        here.save(tmp_path / "d")
        comm.barrier()
        if comm.rank == 0:
            simulated.play(DELAY_S, joins=True)
        comm.barrier()
        back = Job(stage - 1, None, precision="bf16", resident=True).build(nets[2], str(tmp_path), comm)
        back.load(tmp_path / "c", random=False)
        third = steps(nets[2], back, comm.rank, 3, 6)
        for opt in (there, here, back):
            opt.close()
        return first, second, third

    simulated.play(DELAY_S, joins=True)
    for found in ranks(2, tmp_path, body):
        assert len(set(found)) == 1, found


@pytest.mark.parametrize("stage", [2, 3])
def test_what_programs_read_and_set(stage: int, tmp_path: Path) -> None:
    """Gradients, masters, state and whole parameters, by name; a gradient that is not finite; then close()."""
    simulated.play(DELAY_S, joins=True)

    def body(comm: zcomm.Communicator) -> None:
        with seeding:
            torch.manual_seed(0)
            net = Net("plain")
        opt = Job(stage, None, resident=True).build(net, str(tmp_path), comm)
        weight = net.blocks[1].up.weight
        backward(net, opt, comm.rank, 0)
        gradient = zcomm.zero.full_grad(weight)
        assert gradient is not None and gradient.shape == weight.shape and gradient.abs().sum() > 0
        zcomm.zero.set_full_grad(weight, 2 * gradient)
        assert torch.equal(zcomm.zero.full_grad(weight), 2 * gradient)
        opt.step()
        opt.zero_grad()
        value = torch.full(gradient.shape, 0.25)
        zcomm.zero.set_full_param(weight, value)
        assert torch.equal(zcomm.zero.full_param(weight), value)
        assert stage == 3 or torch.equal(weight.detach(), value)
        with zcomm.zero.GatheredParameters([weight], modifier_rank=1):
            if comm.rank == 1:
                with torch.no_grad():
                    weight.fill_(0.5)
        assert torch.equal(zcomm.zero.full_param(weight), torch.full(gradient.shape, 0.5))
        loss = loss_of(net, comm.rank, 1)
        opt.backward(loss * (float("nan") if comm.rank == 1 else 1.0))
        opt.step()
        assert opt.nonfinite is not None and opt.nonfinite.step == 2
        opt.zero_grad()
        opt.close()
        assert stage == 3 or (weight.shape == value.shape and weight.untyped_storage().nbytes() == weight.nbytes)

    ranks(2, tmp_path, body)


def test_where_devices_do_not_reach_each_other_the_host_helps(tmp_path: Path) -> None:
    simulated.play(DELAY_S)  # they do not

    def body(comm: zcomm.Communicator) -> str:
        with seeding:
            torch.manual_seed(0)
            net = Net("plain")
        opt = Job(2, None).build(net, str(tmp_path), comm)
        assert opt._parts.comms.peers is NO_PEERS and not opt._parts.updates.on_device.numbers
        backward(net, opt, comm.rank, 0)
        opt.step()
        found = digest(opt.full_state_dict())
        opt.close()
        return found

    by_host = ranks(2, tmp_path, body)
    assert by_host[0] == by_host[1]


class Branches(nn.Module):
    """``extra`` is used where a test asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(6))
        self.blocks[1].extra = nn.Parameter(torch.ones(24))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            x = x * block.extra if use and hasattr(block, "extra") else x
        return x


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_that_one_rank_reaches(stage: int, tmp_path: Path) -> None:
    """Buckets leave at other moments than on the other rank, between other units."""

    def body(comm: zcomm.Communicator) -> tuple[list[str], str]:
        with seeding:
            torch.manual_seed(0)
            net = Branches()
        opt = Job(stage, None, bucket_mb=25.0, resident=True).build(net, str(tmp_path), comm)
        losses = []
        for number in range(4):
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * number + comm.rank))
            loss = net(x, comm.rank == 0).square().mean()
            opt.backward(loss)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item().hex())
        found = losses, digest(opt.full_state_dict())
        opt.close()
        return found

    plain = ranks(2, tmp_path, body)
    simulated.play(DELAY_S, joins=True)
    assert ranks(2, tmp_path, body) == plain


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_error_amid_the_step_is_told(stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for the rank that failed; after a load all is as if nothing had happened."""
    simulated.play(DELAY_S, joins=True)
    fails: set[int] = set()
    ordinary_step = DeviceState.step_shard

    def step_shard(self: DeviceState, shard: Any) -> None:
        if self._lane.core.name in fails and shard.bucket == 2:
            raise OSError(errno.ENOMEM, "no room for what the rule needs")
        ordinary_step(self, shard)

    monkeypatch.setattr(DeviceState, "step_shard", step_shard)

    def body(comm: zcomm.Communicator) -> list[str]:
        with seeding:
            torch.manual_seed(0)
            net = Net("plain")
        opt = Job(stage, None, resident=True).build(net, str(tmp_path), comm)
        lane = opt._parts.state.kinds[-1]._lane
        lane.core = Named(lane.core, f"rank {comm.rank}")
        ends = []
        for number in (0, 1, 2, 1, 2):
            if number == 1 and not ends:
                opt.save(tmp_path / "c")
            backward(net, opt, comm.rank, number)
            opt.step()
            opt.zero_grad()
            if number == 2 and not ends:
                ends.append(digest(opt.full_state_dict()))
                if comm.rank == 1:
                    fails.add("rank 1")
                backward(net, opt, comm.rank, 3)
                with pytest.raises(OSError, match="no room" if comm.rank == 1 else "step.. failed on rank 1"):
                    opt.step()
                fails.clear()
                opt.load(tmp_path / "c")
                opt.zero_grad()
        ends.append(digest(opt.full_state_dict()))
        opt.close()
        return ends

    for first, second in ranks(2, tmp_path, body):
        assert first == second


class Named:
    """A core device under another name."""

    def __init__(self, core: Any, name: str) -> None:
        self._core, self.name = core, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)


@pytest.mark.parametrize("refused", [(), (0,), (0, 1)])
def test_what_a_driver_refuses_on_one_rank_is_left_by_all(
    refused: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary_over = cuda_ipc.over

    def over(control: Joined, core_device: Any, device: str) -> Joined:
        if control.core.rank in refused:
            raise zcomm.CudaError("no peer access after all")
        return ordinary_over(control, core_device, "cpu")

    monkeypatch.setattr(cuda_ipc, "over", over)
    monkeypatch.setattr(cuda_ipc, "reaches_all", lambda job, index: True)

    def body(comm: zcomm.Communicator) -> bool:
        found = cuda_ipc.beside(comm, simulated.device(comm.rank, 0.0), torch.device("cuda:0"))
        tensor = torch.full((5,), float(comm.rank))
        (comm if found is None else found).all_reduce(tensor)
        assert tensor.eq(1.0).all()
        if found is not None:
            found.close()
        return found is None

    assert ranks(2, tmp_path, body) == [bool(refused)] * 2
