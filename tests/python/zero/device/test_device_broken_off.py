"""Interruptions on a (simulated) device: a gather by an interrupt or an error, a step, a rank that is gone.

Afterwards nothing half done is taken for whole.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_corners import Net, loss_of
from test_device_peers import backward, ranks, seeding
from tiers import slow
from zcomm.comm import Communicator
from zcomm.memory.device_streams import CopyStream
from zcomm.zero.optim_state.device import StagedState
from zcomm.zero.units.device import DeviceMemory
from zcomm.zero.units.fillers import FromHost
from zero_jobs import digest


def trained(comm: zcomm.Communicator, folder: Path, job: Job, steps: int = 2) -> tuple[torch.nn.Module, Any]:
    with seeding:
        torch.manual_seed(0)
        net = Net("plain")
    opt = job.build(net, str(folder), comm)
    for number in range(steps):
        backward(net, opt, comm.rank, number)
        opt.step()
        opt.zero_grad()
    return net, opt


def loss(net: torch.nn.Module, comm: zcomm.Communicator) -> float:
    with torch.no_grad():
        return loss_of(net, comm.rank, 5).item()


@pytest.mark.parametrize("job", [slow(Job(3, "cpu", mixed=True)), Job(3, "mixed", mixed=True), slow(Job(3))], ids=str)
@pytest.mark.parametrize("place", ["before", "amid", "behind"])
def test_a_gather_that_was_interrupted_is_not_taken_for_whole(
    job: Job, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt as by Ctrl-C in a notebook, and run the model again."""
    simulated.play(0.001)
    countdown = [0]

    def interrupt() -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt

    fill, start = DeviceMemory.fill, FromHost.start

    def interrupted_fill(self: Any, unit: Any) -> None:
        if place == "before":
            interrupt()
        fill(self, unit)
        if place == "behind":
            interrupt()

    def interrupted_start(self: Any, unit: Any, where: Any) -> None:
        if place == "amid" and self._buckets[unit.index]:
            interrupt()
        start(self, unit, where)

    monkeypatch.setattr(DeviceMemory, "fill", interrupted_fill)
    monkeypatch.setattr(FromHost, "start", interrupted_start)

    def body(comm: zcomm.Communicator) -> None:
        net, opt = trained(comm, tmp_path, job)
        interrupted = 0
        for calls in range(1, 7):
            backward(net, opt, comm.rank, 1)
            opt.step()
            opt.zero_grad()
            countdown[0] = calls
            try:
                loss(net, comm)
            except KeyboardInterrupt:
                interrupted += 1
            countdown[0] = 0
            again = loss(net, comm)
            opt._parts.store.synchronize()  # all units are gathered again
            assert again == loss(net, comm)
        assert interrupted >= 3
        opt.close()

    ranks(1, tmp_path, body)


def test_a_gather_that_fails_when_it_is_called_fails_again_or_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.play(0.001, joins=True)
    fails: dict[int, int] = {}
    original = Communicator.all_gather

    def all_gather(self: Communicator, *args: Any, **how: Any) -> Any:
        if how.get("name", "").startswith("unit "):
            fails[self.rank] = fails.get(self.rank, 0) - 1
            if fails[self.rank] == 0:
                raise zcomm.CudaError("no more of it")
        return original(self, *args, **how)

    def body(comm: zcomm.Communicator) -> None:
        net, opt = trained(comm, tmp_path, Job(3, "mixed", mixed=True))
        for calls in range(1, 5):
            backward(net, opt, comm.rank, calls)
            opt.step()
            opt.zero_grad()
            fails[comm.rank] = calls
            with pytest.raises(zcomm.CudaError):
                loss(net, comm)
            again = loss(net, comm)
            opt._parts.store.synchronize()
            assert again == loss(net, comm)
        opt.close()

    monkeypatch.setattr(Communicator, "all_gather", all_gather)
    ranks(2, tmp_path, body)


def test_weights_of_a_broken_step_do_not_come_home_after_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated.play()
    original = StagedState._await
    fails = [False]

    def interrupted(self: StagedState, events: Any) -> None:
        if fails[0]:
            fails[0] = False
            raise KeyboardInterrupt
        original(self, events)

    monkeypatch.setattr(StagedState, "_await", interrupted)

    def body(comm: zcomm.Communicator) -> None:
        net, opt = trained(comm, tmp_path, Job(3, None, bucket_mb=25.0))  # weights on the host, their state is not
        assert any(isinstance(state, StagedState) for state in opt._parts.state.kinds)
        opt.save(tmp_path / "c")
        saved = digest(opt.full_state_dict())
        opt._parts.lane.d2h = CopyStream(simulated.device(9, 0.1).make_stream())  # a slow bus
        for number in range(2):
            backward(net, opt, comm.rank, 2 + number)
            fails[0] = True
            with pytest.raises(KeyboardInterrupt):
                opt.step()
            opt.load(tmp_path / "c")
            opt._parts.lane.wait_for(opt._parts.lane.d2h)
            assert digest(opt.full_state_dict()) == saved
            opt.zero_grad()
        opt.close()

    ranks(1, tmp_path, body)


def test_nobody_waits_for_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def wait_for(self, patience_s: float) -> bool:
            return False

    lane = simulated.SimulatedLane(torch.device("cpu"), simulated.device(1, 0.0))
    lane.peers = [SimpleNamespace(_lost=lambda: True)]  # type: ignore[list-item]
    with pytest.raises(zcomm.PeerLost, match="simulated waits for a rank that is gone"):
        lane.wait(Never())  # type: ignore[arg-type]
    lane.wait(lane.event())
    monkeypatch.setattr(lane, "event", Never)
    monkeypatch.setattr(lane.h2d, "copy", lambda *args: None)
    with pytest.raises(zcomm.PeerLost):
        lane.wait_for(lane.h2d)
