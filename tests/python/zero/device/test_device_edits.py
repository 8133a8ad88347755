"""Edits of weights on a (simulated) device that move no version counter: as edits that move one, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import simulated
import zcomm
from zcomm.comm.work import Work
from zcomm.zero import full_param, set_full_param
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.params.device import DeviceStore

Edit = Callable[[torch.Tensor], Any]
Run = Callable[..., list[Any]]


@pytest.fixture
def there(world_of_one: None) -> Iterator[None]:
    simulated.play(0.0002)
    yield


def exchange(value: torch.Tensor) -> None:
    """Exchange the first two rows: no sum of the elements changes."""
    value[:2] = value[:2].flip(0)


ACTS: dict[str, Edit] = {
    "clamp": lambda value: value.clamp_(-0.05, 0.05),
    "mul": lambda value: value.mul_(0.9),
    "exchange": exchange,
    "neg": lambda value: value.neg_(),
}
UNSEEN: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "data": lambda param: param.data,
    "dlpack": lambda param: from_dlpack(to_dlpack(param.detach())),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0, "offload": "cpu"},
    "stage 2": {"stage": 2, "offload": "cpu"},
    "private": {"stage": 1, "offload": "cpu", "share_parameters": False, "bucket_mb": 0.001},
    "clip": {"stage": 2, "offload": "cpu", "clip_norm": 0.5},
    "fraction": {"stage": 2, "offload": zcomm.Offload("cpu", fraction=0.5), "bucket_mb": 0.001},
    "behind": {"stage": 1, "offload": zcomm.Offload("cpu", step_behind_forward=True)},
    "bf16": {"stage": 2, "offload": "cpu", "precision": "bf16"},
    "fp16": {"stage": 2, "offload": "cpu", "precision": "fp16"},
    "fp16 there": {"stage": 2, "precision": "fp16", "bucket_mb": 0.001},
}
IN_TIME = {"clip", "fp16", "fp16 there"}  # their norm is known before the update


def net() -> nn.Module:
    torch.manual_seed(0)
    tied = nn.Linear(32, 16)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), tied, nn.Tanh(), nn.Linear(16, 32), nn.Tanh(), tied)


def build(model: nn.Module, setting: dict[str, Any]) -> Any:
    return zcomm.ZeroOptimizer(model, "sgd", lr=0.1, momentum=0.9, **setting)


def backward(model: nn.Module, opt: Any, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + zcomm.rank()))
    opt.backward(model(x.to(next(model.parameters()).dtype)).float().square().mean())


def edit_all(model: nn.Module, act: Edit, view: Callable[[nn.Parameter], torch.Tensor] | None) -> None:
    with torch.no_grad():
        for param in model.parameters():
            act(param if view is None else view(param))


def train(
    setting: dict[str, Any], act: Edit, view: Callable[[nn.Parameter], torch.Tensor] | None, late: bool = False
) -> list[torch.Tensor]:
    """Return the weights, and the masters, after three steps with edits. view: writes without a version counter."""
    model = net()
    opt = build(model, setting)
    for step in range(3):
        backward(model, opt, step)
        if late:
            edit_all(model, act, view)
        opt.step()
        opt.zero_grad()
        if not late:
            edit_all(model, act, view)
    found = [param.detach().float().clone() for param in model.parameters()]
    found += [full_param(param) for param in model.parameters()]
    opt.close()
    return found


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def wrong_edits() -> list[str]:
    """Each kind of edit in one setting, one kind in each."""
    wrong = []
    cases = [("stage 2", name, how) for name in ACTS for how in UNSEEN] + [(each, "mul", "data") for each in SETTINGS]
    for setting, name, how in cases:
        found, wanted = (train(SETTINGS[setting], ACTS[name], view) for view in (UNSEEN[how], None))
        if not same(found, wanted):
            wrong.append(f"{setting}, {name} by {how}")
    return wrong


def test_edits_between_steps_count(there: None) -> None:
    assert wrong_edits() == []


def test_edits_of_every_rank_count(run_ranks: Run) -> None:
    assert run_ranks(simulated.on_device, 2, 1, wrong_edits) == [[], []]


def edits_beside_a_late_rank() -> list[str]:
    """Rank 0 edits and steps while rank 1 has not yet copied the last weights out of the memory that they share."""
    simulated.play()
    send = DeviceStore._send_others

    def late(store: DeviceStore, bucket: FlatBucket, spread: Work) -> None:
        spread.wait()
        time.sleep(0.1)
        send(store, bucket, spread)

    with pytest.MonkeyPatch.context() as patch:
        wanted = {setting: train(SETTINGS[setting], ACTS["mul"], None) for setting in ("stage 2", "bf16")}
        if zcomm.rank() == 1:
            patch.setattr(DeviceStore, "_send_others", late)
        found = {setting: train(SETTINGS[setting], ACTS["mul"], UNSEEN["data"]) for setting in wanted}
    simulated.stop()
    return [setting for setting in wanted if not same(found[setting], wanted[setting])]


def test_edits_wait_for_copies_of_other_ranks(run_ranks: Run) -> None:
    assert run_ranks(edits_beside_a_late_rank, 2) == [[], []]


def late_edits() -> list[str]:
    wrong, in_time = [], IN_TIME | ({"behind"} if zcomm.init().world_size > 1 else set())
    for setting in SETTINGS:
        try:
            if not same(*(train(SETTINGS[setting], ACTS["mul"], view, late=True) for view in (UNSEEN["data"], None))):
                wrong.append(setting)
        except RuntimeError as error:
            if setting in in_time or "edited on the device between backward() and step()" not in str(error):
                wrong.append(f"{setting}: {error}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_edits_behind_backward_count_or_raise(run_ranks: Run, world_size: int) -> None:
    assert run_ranks(simulated.on_device, world_size, 1, late_edits) == [[]] * world_size


@pytest.mark.parametrize("setting", ["stage 2", "behind", "bf16"])
def test_a_late_edit_of_weights_that_were_edited_before_raises(there: None, setting: str) -> None:
    model = net()
    opt = build(model, SETTINGS[setting])
    edit_all(model, ACTS["mul"], UNSEEN["data"])
    backward(model, opt, 0)
    opt.step()
    opt.zero_grad()
    edit_all(model, ACTS["mul"], UNSEEN["data"])
    backward(model, opt, 1)
    edit_all(model, ACTS["mul"], UNSEEN["data"])
    with pytest.raises(RuntimeError, match=r"edited on the device between backward\(\) and step\(\)"):
        opt.step()
    opt.close()


def edits_of_one_rank() -> str:
    """Edit an element only on rank 1, which keeps it."""
    model = net()
    opt = build(model, SETTINGS["stage 2"])
    for step in range(3):
        backward(model, opt, step)
        if step == 2 and zcomm.rank() == 1:
            edit_all(model, ACTS["mul"], UNSEEN["data"])
        try:
            opt.step()
        except RuntimeError as error:
            return str(error)
        opt.zero_grad()
    return ""


def test_all_ranks_raise_for_a_late_edit_of_one(run_ranks: Run) -> None:
    first, second = run_ranks(simulated.on_device, 2, 1, edits_of_one_rank)
    assert "parameters of another rank" in first
    assert "0.weight" in second


@pytest.mark.parametrize("setting", ["stage 2", "fraction", "bf16", "fp16", "fp16 there"])
@pytest.mark.parametrize("view", ["version", "data"])
def test_looks_and_setters_see_edits(there: None, setting: str, view: str) -> None:
    """Read weights and masters after an edit, and set another parameter: the edit stays."""
    model = net()
    opt = build(model, SETTINGS[setting])
    for group in opt.param_groups:
        group["lr"], group["momentum"] = 0.0, 0.0
    backward(model, opt, 0)
    opt.step()
    opt.zero_grad()
    edit_all(model, lambda value: value.fill_(0.5), None if view == "version" else UNSEEN[view])
    ulp = 2**-8 if setting == "bf16" else 0.0  # the lower half of its masters stays
    masters = [full_param(param) for param in model.parameters()]
    masters += [entry["master"] for entry in opt.state_dict()["state"].values() if "master" in entry]
    assert all(float((each - 0.5).abs().max()) <= ulp for each in masters)
    set_full_param(model[0].bias, torch.ones(32))
    backward(model, opt, 1)
    opt.step()
    for param in model.parameters():
        value = 1.0 if param is model[0].bias else 0.5
        assert bool((param == value).all())
        assert float((full_param(param) - value).abs().max()) <= ulp
    opt.close()
