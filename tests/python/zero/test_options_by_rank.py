"""Options that a program changes on some ranks between steps: all ranks raise and name them; no weight is updated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import simulated
import zcomm
from zero_jobs import digest

Run = Callable[..., list[Any]]
UNITS: dict[str, Any] = {"stage": 3, "share_parameters": False, "bucket_mb": 0.01}
DRIVE: dict[str, Any] = {**UNITS, "offload": {"params": "nvme", "optimizer": "nvme", "gradients": "nvme"}}
PLACES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 2, fp16": {"stage": 2, "precision": "fp16", "loss_scale": 64.0},
    "stage 3": {"stage": 3},
    "units": UNITS,
    "forward": {**DRIVE, "update": "forward"},
    "backward": {**DRIVE, "update": "backward"},
    "atomic": {**DRIVE, "update": "step", "atomic": True},
    "atomic forward": {**DRIVE, "update": "forward", "atomic": True},
    "atomic backward": {**DRIVE, "update": "backward", "atomic": True},
    "muon": {"stage": 2, "optimizer": "muon"},
    "lamb": {"stage": 2, "optimizer": "lamb"},
    "rmsprop": {"stage": 2, "optimizer": "rmsprop"},
    "on a device, clipped": {"stage": 2, "offload": {"optimizer": "cpu"}, "clip_norm": 9.0},
    "on a device": {"stage": 2, "offload": {"optimizer": "cpu"}},
}
HALF_DONE = ("backward", "on a device")  # weights are updated before ranks compare options


def set_of_group(key: str, value: Any) -> Callable[[Any], None]:
    return lambda opt: opt.param_groups[0].update({key: value})


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "weight decay": (set_of_group("weight_decay", 0.5), "weight_decay of group 0 is 0.0 on rank 0 and 0.5 on rank 1"),
    "betas": (set_of_group("betas", (0.8, 0.9)), "betas of group 0 is [0.9, 0.999] on rank 0 and [0.8, 0.9] on rank 1"),
    "a tensor": (set_of_group("lr", torch.tensor(0.5)), "lr of group 0 is 0.125 on rank 0 and 0.5 on rank 1"),
    "steps": (set_of_group("step", 9), "step of group 0 is 1 on rank 0 and 9 on rank 1"),
    "clip": (lambda opt: setattr(opt, "clip_norm", 0.01), "clip_norm is None on rank 0 and 0.01 on rank 1"),
    "micro-steps": (lambda opt: setattr(opt, "grad_accum", 4), "grad_accum is 1 on rank 0 and 4 on rank 1"),
    "refused": (set_of_group("betas", "none"), "betas of group 0 is [0.9, 0.999] on rank 0 and none on rank 1"),
    "groups": (lambda opt: opt.param_groups.append({"params": []}), "there were 1 param groups, now 2"),
}


class Training:
    def __init__(self, folder: str, optimizer: str = "adam", offload: Any = None, **options: Any) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(4)))
        modes = {key: options.pop(key) for key in ("update", "atomic") if key in options}
        if offload is not None:
            options |= {"offload": zcomm.Offload(**offload, **modes), "nvme_path": folder}
        self.opt: Any = zcomm.ZeroOptimizer(self.net, optimizer, lr=0.125, **options)

    def backward(self, number: int) -> None:
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2 * number + zcomm.rank()))
        self.opt.backward(self.net(x.to(self.net[0].weight.dtype)).float().square().mean())

    def step(self, number: int) -> None:
        self.opt.zero_grad()
        self.backward(number)
        self.opt.step()

    def bits(self) -> str:
        return digest(self.opt.full_state_dict())


def error_of(act: Callable[..., None], *args: Any) -> str:
    try:
        act(*args)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def a_rate_differs(folder: str) -> None:
    zcomm.init(timeout=30)
    for name, options in PLACES.items():
        if name.startswith("on a device"):
            simulated.play()
        twin, mine = Training(folder, **options), Training(folder, **options)
        for number in range(3):  # updates in backward begin after two steps
            twin.step(number)
            mine.step(number)
        before = mine.bits()
        rates = [group["lr"] for group in mine.opt.param_groups]
        for group in mine.opt.param_groups if zcomm.rank() == 1 else ():
            group["lr"] = 1.0
        error = error_of(mine.step, 3)
        assert "lr of group 0 is 0.125 on rank 0 and 1.0 on rank 1" in error, (name, error)
        if name in HALF_DONE:
            assert "load a checkpoint" in error and "two steps" in error_of(mine.step, 3), (name, error)
        else:
            assert mine.bits() == before, name
            for group, rate in zip(mine.opt.param_groups, rates, strict=True):
                group["lr"] = rate
            twin.step(3)
            if "atomic" in name:
                mine.step(3)  # its gradients were dropped
            else:
                mine.opt.step()
            assert mine.bits() == twin.bits(), name
        twin.opt.close()
        mine.opt.close()
    simulated.stop()


def others_differ(folder: str) -> None:
    zcomm.init(timeout=30)
    for name, (change, words) in CHANGES.items():
        mine = Training(folder, stage=2)
        mine.opt.boundary = True
        mine.step(0)
        before = mine.bits()
        mine.opt.zero_grad()
        mine.backward(1)
        if zcomm.rank() == 1:
            change(mine.opt)
        error = error_of(mine.opt.step)
        assert words in error, (name, error)
        assert mine.bits() == before, name
        mine.opt.close()

    scaled = Training(folder, stage=2, precision="fp16", loss_scale=zcomm.zero.LossScale(initial_power=4))
    if zcomm.rank() == 1:
        scaled.opt.scaler.scale = 32.0
    error = error_of(scaled.step, 0)
    assert "the loss scale of the gradients is 16.0 on rank 0 and 32.0 on rank 1" in error, error
    scaled.opt.close()

    refused = Training(folder, stage=2, precision="fp16", loss_scale=64.0)
    refused.net(torch.ones(4, 32).half()).sum().backward()
    assert "needs opt.backward(loss)" in error_of(refused.opt.step), "all ranks refuse in the same words"
    refused.opt.close()

    same = Training(folder, stage=2)  # equal values of other types, and a key that no update reads
    same.opt.param_groups[0].update(lr=(1, 1.0)[zcomm.rank()], note=zcomm.rank())
    same.step(0)
    same.opt.close()


def test_a_rate(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(a_rate_differs, 2, str(tmp_path))


def test_other_options(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(others_differ, 2, str(tmp_path))
