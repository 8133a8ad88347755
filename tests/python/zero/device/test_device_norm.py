"""The norm of gradients that leave a (simulated) device: known before their copies end, or of the sums on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import simulated
import zcomm
from device_jobs import Job
from test_corners import Net, loss_of
from zcomm.memory import device_streams
from zcomm.zero.gradients.host import HostTransport
from zcomm.zero.gradients.last_pass import LastPassTransport
from zcomm.zero.gradients.norm import GradientNorm, Squares
from zcomm.zero.steps.step import OptimizerStep


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """In order: "host" for a shard that the host squares, "wait" for a gradient that is waited for, "norm"."""
    events: list[str] = []
    monkeypatch.setattr(device_streams, "PIECE_NBYTES", 512)  # copies are slow: a delay for each piece

    def tell(owner: type, method: str, what: str, counts: Any = lambda *_values: True) -> None:
        ordinary = getattr(owner, method)

        def told(self: Any, *values: Any, **options: Any) -> Any:
            if counts(self, *values):
                events.append(what)
            return ordinary(self, *values, **options)

        monkeypatch.setattr(owner, method, told)

    tell(Squares, "add", "host")
    tell(GradientNorm, "end", "norm")
    tell(HostTransport, "wait", "wait", lambda transport, number: transport._works[number] is not None)
    tell(LastPassTransport, "finish", "wait", lambda transport, bucket: bucket.index in transport._waiting)
    norm = OptimizerStep.norm

    def told_norm(self: OptimizerStep) -> float:
        total = norm(self)
        pinned = next(each for each in self._parts.reducer.accumulators.kinds if not each.on_device)
        one_pass = isinstance(pinned, LastPassTransport) and bool(pinned._waiting)
        pending = pinned._copied if one_pass else [work for work in pinned._works if work is not None]
        events.append(f"{sum(not each.done() for each in pending)} on their way")
        return total

    monkeypatch.setattr(OptimizerStep, "norm", told_norm)
    return events


def backward(net: Net, opt: Any, number: int = 0) -> None:
    opt.backward(loss_of(net, 0, number))


JOBS = [
    Job(2, clip=0.5), Job(0, precision="bf16", clip=0.5), Job(3, precision="fp16"), Job(1, "nvme", precision="bf16"),
    Job(2, "mixed", clip=1.0), Job(2, fraction=0.5, clip=0.5), Job(2, clip=0.5, behind=True), Job(2),
]  # fmt: skip


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_single_pass_is_squared_on_the_device(tmp_path: Path, seen: list[str], job: Job) -> None:
    simulated.play(0.003)
    torch.manual_seed(0)
    net = Net("plain")
    opt = job.build(net, str(tmp_path))
    late = 0
    for number in range(3):
        backward(net, opt, number)
        seen.clear()
        opt.step()
        opt.join()
        opt.zero_grad()
        assert "host" not in seen, "the host has read gradients for the norm"
        if job.clip is not None or job.precision == "fp16":
            assert seen[0] == "norm" and "wait" in seen, "the norm has waited for gradients to land"
            late += seen[1] != "0 on their way"
    opt.close()
    if job in (Job(2, clip=0.5), Job(3, precision="fp16"), Job(2, clip=0.5, behind=True)):
        # A loaded machine may land them earlier now and then; a norm that waits for them lands them every time.
        assert late > 0, "gradients were on their way when the norm was known"


def test_what_the_host_alone_has_is_squared_there(tmp_path: Path, seen: list[str]) -> None:
    simulated.play()
    torch.manual_seed(0)
    net = Net("plain")
    opt = Job(2, accum=2, clip=0.5).build(net, str(tmp_path))
    buckets = len(opt._live.geometry.buckets)
    for number in range(4):
        backward(net, opt, number)
        opt.step()
        opt.zero_grad()
    assert seen.count("host") == 2 * buckets and seen.count("norm") == 2
    opt.close()


@pytest.mark.parametrize("job", [Job(2, accum=2), Job(1, accum=2, optimizer="nadam"), Job(3, accum=2)], ids=str)
def test_an_update_before_the_norm_squares_what_it_reads(tmp_path: Path, seen: list[str], job: Job) -> None:
    simulated.play()
    torch.manual_seed(0)
    net = Net("plain")
    opt = job.build(net, str(tmp_path))
    for number in range(4):
        backward(net, opt, number)
        opt.step()
        opt.zero_grad()
    assert "norm" in seen and "host" not in seen, "the norm takes a pass of its own"
    opt.close()


def test_a_gradient_that_was_set_counts(tmp_path: Path) -> None:
    simulated.play()
    torch.manual_seed(0)
    net = Net("plain")
    opt = Job(2, clip=1e9).build(net, str(tmp_path))
    for param in net.parameters():
        param.requires_grad_(True)
    backward(net, opt)
    squares = 0.0
    for number, param in enumerate(net.parameters()):
        zcomm.zero.set_full_grad(param, torch.full_like(param, number + 1.0))
        squares += (number + 1.0) ** 2 * param.numel()
    opt.step()
    assert opt.grad_norm == squares**0.5
    opt.close()


def test_the_gradient_that_is_not_finite_is_named_when_it_has_landed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm says that there is one, while it is on its way; the next pass goes on at once."""
    monkeypatch.setattr(device_streams, "PIECE_NBYTES", 512)
    ends = []
    for there in (False, True):
        if there:
            simulated.play(0.003)
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2, precision="fp16").build(net, str(tmp_path))
        for number in range(3):
            handle = net.embed.weight.register_hook(lambda grad, bad=number == 1: grad * (float("inf") if bad else 1))
            backward(net, opt, number)
            handle.remove()
            opt.step()
            opt.zero_grad()
        assert opt.skipped_steps == 1 and opt.nonfinite.parameter == "embed.weight"
        ends.append((opt.grad_norm, opt.full_state_dict()))
        opt.close()
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])


def test_a_pass_that_failed_leaves_nothing_in_the_sum(tmp_path: Path) -> None:
    norms = []
    for there in (False, True):
        if there:
            simulated.play()
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2, clip=0.5).build(net, str(tmp_path))
        handle = net.embed.weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(net, opt)  # other buckets have left by then
        handle.remove()
        opt.zero_grad()
        backward(net, opt)
        opt.step()
        norms.append(opt.grad_norm)
        opt.close()
    assert norms[0] == norms[1]


def test_norms_that_are_not_used_spoil_no_other(tmp_path: Path) -> None:
    """A second pass makes the sum of the first one out of date, and the next step begins a new sum."""
    norms: list[list[float]] = []
    for there in (False, True):
        if there:
            simulated.play(0.0003)
        torch.manual_seed(0)
        net = Net("plain")
        opt = Job(2, clip=0.5).build(net, str(tmp_path))
        norms.append([])
        for passes in (1, 2, 1, 3, 1):
            for number in range(passes):
                backward(net, opt, number)
            opt.step()
            opt.zero_grad()
            norms[-1].append(opt.grad_norm)
        opt.close()
    assert norms[0] == norms[1]
