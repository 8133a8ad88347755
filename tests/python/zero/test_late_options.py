"""Options that a program sets after construction, for example by a schedule: torch's numbers, or an error names them.

SGD and RMSprop need more arrays once their momentum is not 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import simulated
import zcomm
from zcomm.zero.registry import train_of
from zcomm.zero.rules.torch_rule import TorchRule

Run = Callable[..., list[Any]]
Change = Callable[[dict[str, Any], int], Any]
UNITS: dict[str, Any] = {"stage": 3, "share_parameters": False, "bucket_mb": 0.005}
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 2, bf16": {"stage": 2, "precision": "bf16"},
    "stage 2, fp16": {"stage": 2, "precision": "fp16", "loss_scale": 64.0},
    "stage 3, cpu": {"stage": 3, "offload": "cpu"},
    "forward": {**UNITS, "offload": {"params": "nvme", "optimizer": "cpu", "gradients": "nvme", "update": "forward"}},
    "backward": {**UNITS, "offload": {"params": "nvme", "optimizer": "cpu", "gradients": "nvme", "update": "backward"}},
    "atomic": {**UNITS, "offload": {"params": "nvme", "optimizer": "cpu", "atomic": True}},
    "device": {"stage": 2},
    "device, fp16": {"stage": 2, "precision": "fp16", "loss_scale": 64.0},
    "device, units": {"stage": 3, "bucket_mb": 0.005},
}


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))


def loss_of(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * number + rank))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def by_torch(kind: type[torch.optim.Optimizer], ranks: int, change: Change, steps: int) -> dict[str, torch.Tensor]:
    model = network()
    opt = kind(model.parameters(), lr=0.05)
    for number in range(steps):
        change(opt.param_groups[0], number)
        opt.zero_grad()
        sum((loss_of(model, number, rank) for rank in range(ranks)), torch.zeros(())).div(ranks).backward()
        opt.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def momentum_comes(group: dict[str, Any], number: int) -> None:
    if number == 3:
        group.update(momentum=0.9, dampening=0.5)


def in_all_places(folder: str) -> None:
    rank, ranks = zcomm.init(timeout=60).rank, zcomm.world_size()
    wanted = by_torch(torch.optim.SGD, ranks, momentum_comes, 6)
    for name, options in PLACES.items():
        if name.startswith("device"):
            simulated.play()
        if isinstance(options.get("offload"), dict):
            options = {**options, "offload": zcomm.Offload(**options["offload"]), "nvme_path": folder}
        model = network()
        opt: Any = zcomm.ZeroOptimizer(model, "sgd", lr=0.05, **options)
        before = sum(opt.memory()[tier]["optimizer"] for tier in ("device", "cpu"))
        for number in range(6):
            momentum_comes(opt.param_groups[0], number)
            opt.zero_grad()
            opt.backward(loss_of(model, number, rank))
            opt.step()
        after = sum(opt.memory()[tier]["optimizer"] for tier in ("device", "cpu"))
        assert after >= before + 4 * sum(p.numel() for p in network().parameters()) // ranks, name
        half = "precision" in options
        for key, value in opt.full_state_dict().items():
            torch.testing.assert_close(
                value.float(), wanted[key], rtol=0.02 if half else 1e-4, atol=0.01 if half else 1e-5
            )
        opt.close()
    simulated.stop()


def test_momentum_that_comes_later(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(in_all_places, 2, str(tmp_path))


def never(group: dict[str, Any], number: int) -> None:
    pass


def at(when: int, **options: Any) -> Change:
    return lambda group, number: group.update(options) if number == when else None


CHANGES: dict[str, tuple[type[torch.optim.Optimizer], Change]] = {
    "nesterov": (torch.optim.SGD, at(0, momentum=0.9, nesterov=True)),
    "nesterov, dampened": (torch.optim.SGD, at(2, momentum=0.9, nesterov=True, dampening=0.5)),
    "nesterov without momentum": (torch.optim.SGD, at(2, nesterov=True)),
    "momentum that ends": (torch.optim.SGD, lambda group, n: group.update(momentum=(0.0, 0.9, 0.9, 0.0, 0.9)[n])),
    "maximize": (torch.optim.Adam, at(2, maximize=True)),
    "decoupled": (torch.optim.Adam, at(2, decoupled_weight_decay=True, weight_decay=0.1)),
    "RMSprop's momentum": (torch.optim.RMSprop, at(0, momentum=0.5)),
    "RMSprop's mean": (torch.optim.RMSprop, at(0, centered=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_options_that_are_set_later(world_of_one: None, name: str) -> None:
    kind, change = CHANGES[name]
    if name == "decoupled" and "decoupled_weight_decay" not in kind([torch.zeros(1)]).defaults:
        pytest.skip("this torch's Adam has no such option")
    wanted = by_torch(kind, 1, change, 5)
    model = network()
    opt: Any = zcomm.ZeroOptimizer(model, kind, lr=0.05, stage=2)
    for number in range(5):
        change(opt.param_groups[0], number)
        opt.zero_grad()
        loss_of(model, number, 0).backward()
        opt.step()
    for key, value in opt.full_state_dict().items():
        torch.testing.assert_close(value, wanted[key])
    opt.close()


def test_options_of_the_same_kind_are_tried_once(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    model = network()
    opt = zcomm.ZeroOptimizer(model, torch.optim.RMSprop, lr=0.0)
    rule = train_of(opt).rule
    assert isinstance(rule, TorchRule)
    once = rule._one_step
    monkeypatch.setattr(rule, "_one_step", lambda *args: tried.append(len(args[3])) or once(*args))
    for number in range(4):
        opt.param_groups[0]["lr"] = 0.1 * (number + 1)
        opt.backward(loss_of(model, number, 0))
        tried.clear()
        opt.step()
        opt.zero_grad()
    opt.close()
    assert tried.count(1) == 1  # the scalars of the step


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_a_one_cycle_schedule_goes_on_after_a_load(world_of_one: None, tmp_path: Path, kind: Any) -> None:
    """OneCycleLR sets the momentum of an optimizer made without momentum."""

    def train(model: nn.Module, opt: Any, schedule: Any, steps: range) -> None:
        for number in steps:
            opt.zero_grad()
            loss_of(model, number, 0).backward()
            opt.step()
            schedule.step()

    plain = network()
    exact = kind(plain.parameters(), lr=0.05)
    train(plain, exact, OneCycleLR(exact, 0.05, total_steps=12), range(8))
    model = network()
    opt: Any = zcomm.ZeroOptimizer(model, kind, lr=0.05, stage=2)
    schedule = OneCycleLR(opt, 0.05, total_steps=12)
    early = copy.deepcopy(opt.state_dict())
    train(model, opt, schedule, range(4))
    opt.save(tmp_path / "saved", scheduler=schedule)
    state, weights, place = opt.state_dict(), opt.full_state_dict(), schedule.state_dict()
    opt.load_state_dict(early)  # from a time without a buffer
    opt.close()
    for by_folder in (True, False):
        other = network()
        again: Any = zcomm.ZeroOptimizer(other, kind, lr=0.05, stage=2)
        if by_folder:
            schedule = OneCycleLR(again, 0.05, total_steps=12)
            again.load(tmp_path / "saved", scheduler=schedule)
        else:
            other.load_state_dict(weights)
            again.load_state_dict(state)
            schedule = OneCycleLR(again, 0.05, total_steps=12)
            schedule.load_state_dict(place)
            again.load_state_dict(state)
        train(other, again, schedule, range(4, 8))
        for key, value in again.full_state_dict().items():
            torch.testing.assert_close(value, plain.get_parameter(key).detach(), rtol=1e-4, atol=1e-5)
        again.close()


def test_momentum_of_a_state_dict_from_before_it_began(world_of_one: None) -> None:
    """A zero buffer before any step counts as missing: torch's first buffer is the gradient, without dampening."""
    model = network()
    opt: Any = zcomm.ZeroOptimizer(model, "sgd", lr=0.05, momentum=0.9, dampening=0.5)
    opt.param_groups[0]["momentum"] = 0.0
    for number in range(2):
        opt.zero_grad()
        loss_of(model, number, 0).backward()
        opt.step()
    saved = opt.state_dict()
    assert all(entry["momentum_buffer"] is None for entry in saved["state"].values())
    opt.load_state_dict(saved)
    opt.param_groups[0]["momentum"] = 0.9
    opt.zero_grad()
    loss_of(model, 2, 0).backward()
    gradient = zcomm.zero.full_grad(model[0].weight).clone()
    opt.step()
    assert torch.equal(zcomm.zero.full_optim_state(model[0].weight, "momentum_buffer"), gradient)
    opt.close()


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("adamw", {"betas": (1.0, 0.99)}, r"betas=\(1.0, 0.99\) must lie in \[0, 1\)"),
    ("adamw", {"betas": (0.9, -0.1)}, r"betas=\(0.9, -0.1\)"),
    ("lion", {"betas": (1.5, 0.99)}, r"betas=\(1.5, 0.99\)"),
    ("adamw", {"state_dtype": torch.bfloat16}, "state_dtype=torch.bfloat16: it was torch.float32 at construction"),
]


@pytest.mark.parametrize(("optimizer", "options", "words"), BAD)
def test_options_that_no_update_can_use(
    world_of_one: None, optimizer: str, options: dict[str, Any], words: str
) -> None:
    model = network()
    opt: Any = zcomm.ZeroOptimizer(model, optimizer, lr=0.05)
    opt.param_groups[0].update(options)
    loss_of(model, 0, 0).backward()
    with pytest.raises(ValueError, match=words):
        opt.step()
    opt.close()
