"""A step that runs behind the next forward: each call waits for its part, and no other call sees the step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
from device_jobs import Job
from test_corners import Net, loss_of


@pytest.fixture(autouse=True)
def device_shard() -> Iterator[None]:
    simulated.play(0.0005)
    yield


class Gate:
    """Holds the sweep of an optimizer at a bucket until it is opened."""

    def __init__(self, opt: Any, bucket: int) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        store, updated = opt._parts.store, opt._parts.store._updated

        def held(each: Any) -> None:
            if each.index == bucket:
                self.reached.set()
                assert self.open.wait(30)
            updated(each)

        store._updated = held


def backward(net: nn.Module, opt: Any, number: int) -> None:
    opt.backward(loss_of(net, 0, number))


def test_the_first_modules_run_while_the_last_are_updated(tmp_path: Path) -> None:
    net = Net("plain")
    opt = Job(2, behind=True).build(net, str(tmp_path))
    last = len(opt._parts.geometry.buckets) - 1
    gate = Gate(opt, last)
    before = net.embed.weight.detach().clone()
    backward(net, opt, 0)
    opt.step()
    opt.zero_grad()
    assert gate.reached.wait(30)
    x = net.embed(torch.arange(4))  # its weights are new, the sweep is not over
    assert not gate.open.is_set()
    assert not torch.equal(net.embed.weight, before), "it has waited for its own bucket"
    ran = threading.Event()
    thread = threading.Thread(target=lambda: (net.head(x), ran.set()))
    thread.start()
    assert not ran.wait(0.2), "its weights are not there"
    gate.open.set()
    assert ran.wait(30)
    thread.join()
    opt.close()


@pytest.mark.parametrize("look", ["state_dict", "memory", "full_state_dict", "join", "stats", "save"])
def test_whatever_looks_waits(tmp_path: Path, look: str) -> None:
    net = Net("plain")
    opt = Job(2, behind=True).build(net, str(tmp_path))
    gate = Gate(opt, 0)
    backward(net, opt, 0)
    opt.step()
    assert gate.reached.wait(30)
    threading.Timer(0.1, gate.open.set).start()
    arguments = [str(tmp_path / "saved")] if look == "save" else []
    getattr(opt, look)(*arguments)
    assert gate.open.is_set() and opt._parts.updates._running is None
    opt.close()


def test_the_learning_rate_is_that_of_the_step(tmp_path: Path) -> None:
    ends = []
    for behind in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2, behind=behind).build(net, str(tmp_path))
        gate = Gate(opt, 0) if behind else None
        for number in range(3):
            backward(net, opt, number)
            opt.step()
            for group in opt.param_groups:
                group["lr"] *= 0.5
            if gate is not None:
                gate.open.set()
            opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_copies_and_lists_of_the_model_see_new_weights(tmp_path: Path) -> None:
    net = Net("plain")
    opt = Job(1, behind=True).build(net, str(tmp_path))
    for number in range(3):
        backward(net, opt, number)
        opt.step()
        opt.zero_grad()
        if number == 0:
            seen = {name: value.clone() for name, value in net.state_dict().items()}
        elif number == 1:
            seen = {name: value.detach().clone() for name, value in net.named_parameters()}
        else:
            seen = dict(copy.deepcopy(net).named_parameters())
        whole = opt.full_state_dict()
        assert all(torch.equal(seen[name], whole[name]) for name in whole)
    opt.close()


def test_an_error_of_the_step_reaches_whoever_waits(tmp_path: Path) -> None:
    net = Net("plain")
    opt = Job(2, behind=True).build(net, str(tmp_path))

    def fail(*_args: Any) -> None:
        raise OSError(5, "the drive is gone")

    backward(net, opt, 0)
    opt._parts.state.step = fail
    opt.step()
    with pytest.raises(OSError, match="the drive is gone"):
        loss_of(net, 0, 1)
    with pytest.raises(OSError, match="the drive is gone"):
        opt.step()
    with pytest.raises(RuntimeError, match="half way"):
        opt.step()
    opt.close()
    assert type(net.head._parameters) is dict, "nothing is left in the model"


def test_a_checkpoint_mends_a_step_that_failed(tmp_path: Path) -> None:
    """Load also before the error has been raised."""
    net, twin_net = Net("plain"), Net("plain")
    twin_net.load_state_dict(net.state_dict())
    opt, twin = (Job(2, behind=True).build(each, str(tmp_path)) for each in (net, twin_net))
    for number in range(2):
        for each, of_each in ((net, opt), (twin_net, twin)):
            backward(each, of_each, number)
            of_each.step()
            of_each.zero_grad()
    opt.save(tmp_path / "good")
    step, steps = opt._parts.state.step, 0

    def fail(shards: Any, *order: Any) -> None:
        nonlocal steps
        steps += 1
        step((next(shards) for _ in range(1)), *order)
        raise OSError(5, "once")

    opt._parts.state.step = fail
    backward(net, opt, 2)
    opt.step()
    opt.load(tmp_path / "good")
    assert steps == 1
    del opt._parts.state.step
    for number in range(2, 5):
        for each, of_each in ((net, opt), (twin_net, twin)):
            backward(each, of_each, number)
            of_each.step()
            of_each.zero_grad()
    ours, theirs = opt.full_state_dict(), twin.full_state_dict()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    opt.close()
    twin.close()


def test_evaluation_and_accumulation_between_steps(tmp_path: Path) -> None:
    ends = []
    for behind in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(0, behind=behind, accum=2).build(net, str(tmp_path))
        losses = []
        for number in range(8):
            backward(net, opt, number)
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                losses.append(loss_of(net, 0, 100 + number).item())
        ends.append((losses, opt.full_state_dict()))
        opt.close()
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])
