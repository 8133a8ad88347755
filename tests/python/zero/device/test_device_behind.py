"""A step that runs behind the next forward: each call waits for its part, and no other call sees the step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
from device_jobs import Job
from test_corners import Net, loss_of
from zero_jobs import digest


@pytest.fixture(autouse=True)
def device_shard() -> Iterator[None]:
    simulated.play(0.0005)
    yield


class Gate:
    """Holds the sweep of an optimizer at a bucket until it is opened."""

    def __init__(self, opt: Any, bucket: int) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        store, updated = opt._parts.store, opt._parts.store.updated

        def held(each: Any) -> None:
            if each.index == bucket:
                self.reached.set()
                assert self.open.wait(30)
            updated(each)

        store.updated = held


def backward(net: nn.Module, opt: Any, number: int) -> None:
    opt.backward(loss_of(net, 0, number))


def step(net: nn.Module, opt: Any, number: int) -> None:
    backward(net, opt, number)
    opt.step()
    opt.zero_grad()


def same_ends(job: Job, folder: Path, act: Callable[[nn.Module, Any], Any]) -> None:
    """Check that ``act`` returns the same, and trains to the same bits, with steps behind forward and without."""
    ends = []
    for behind in (False, True):
        torch.manual_seed(0)
        net = Net("plain")
        opt = replace(job, behind=behind).build(net, str(folder))
        found = act(net, opt)
        ends.append((found, digest(opt.full_state_dict())))
        opt.close()
    assert ends[0] == ends[1]


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
    def act(net: nn.Module, opt: Any) -> None:
        gate = Gate(opt, 0) if opt.offload.update == "forward" else None
        for number in range(3):
            backward(net, opt, number)
            opt.step()
            for group in opt.param_groups:
                group["lr"] *= 0.5
            if gate is not None:
                gate.open.set()
            opt.zero_grad()

    same_ends(Job(2), tmp_path, act)


LOOKS: list[Callable[[nn.Module], Any]] = [
    lambda net: net.state_dict(),
    lambda net: net.named_parameters(),
    lambda net: copy.deepcopy(net).named_parameters(),
]


def test_copies_and_lists_of_the_model_see_new_weights(tmp_path: Path) -> None:
    net = Net("plain")
    opt = Job(1, behind=True).build(net, str(tmp_path))
    for number, look in enumerate(LOOKS):
        step(net, opt, number)
        seen = {name: value.detach().clone() for name, value in dict(look(net)).items()}
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


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_without_all_gradients_holds_no_forward(tmp_path: Path, clip: float | None) -> None:
    """The error comes from the wait for a gradient, so the thread has got some buckets, or none."""
    net = Net("plain")
    opt = Job(2, behind=True, clip=clip).build(net, str(tmp_path))
    accumulators = opt._parts.reducer.accumulators
    finish = accumulators.finish

    def fail(bucket: Any = None) -> None:
        if bucket is not None and bucket.index == 1:
            raise OSError(5, "the device is gone")
        finish(bucket)

    backward(net, opt, 0)
    accumulators.finish = fail
    with pytest.raises(OSError, match="the device is gone"):
        opt.step()
    accumulators.finish = finish
    loss_of(net, 0, 1)
    with pytest.raises(RuntimeError, match="half way"):
        opt.step()
    opt.close()


def test_a_checkpoint_mends_a_step_that_failed(tmp_path: Path) -> None:
    """Load also before the error has been raised."""

    def act(net: nn.Module, opt: Any) -> None:
        for number in range(2):
            step(net, opt, number)
        if opt.offload.update == "forward":
            opt.save(tmp_path / "good")
            update, calls = opt._parts.state.step, []

            def fail(shards: Any, *order: Any) -> None:
                calls.append(order)
                update((next(shards) for _ in range(1)), *order)
                raise OSError(5, "once")

            opt._parts.state.step = fail
            backward(net, opt, 2)
            opt.step()
            opt.load(tmp_path / "good")
            assert len(calls) == 1
            del opt._parts.state.step
        for number in range(2, 5):
            step(net, opt, number)

    same_ends(Job(2), tmp_path, act)


def test_evaluation_and_accumulation_between_steps(tmp_path: Path) -> None:
    def act(net: nn.Module, opt: Any) -> list[float]:
        losses = []
        for number in range(8):
            step(net, opt, number)
            with torch.no_grad():
                losses.append(loss_of(net, 0, 100 + number).item())
        return losses

    same_ends(Job(0, accum=2), tmp_path, act)
