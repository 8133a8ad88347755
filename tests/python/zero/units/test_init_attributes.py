"""Parameters of zero.Init keep the program's settings: attributes, class, hooks, requires_grad."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from places import LIBRARIES
from tiers import long, slow
from zcomm.zero import GatheredParameters, Init

Run = Callable[..., list[Any]]
SIZE = 48  # a square weight of this size is large enough to be deferred


class Marked(nn.Parameter):
    """A program's own class, with a slot and a method."""

    __slots__ = ("where",)

    def twice(self) -> torch.Tensor:
        return self.detach() * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.marked = Marked(torch.randn(SIZE, SIZE))
        self.frozen = nn.Linear(SIZE, SIZE)
        self.frozen.requires_grad_(requires_grad=False)
        self.last = nn.Linear(SIZE, SIZE)
        self.first.weight.inside = "Init"
        self.marked.inside = "Init"
        self.marked.where = "a slot"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.first(x)) @ self.marked))


def built() -> Net:
    torch.manual_seed(5)
    with Init():
        net = Net()
    assert net.first.weight.is_meta and net.marked.is_meta and net.frozen.weight.is_meta
    for number, (name, param) in enumerate(net.named_parameters()):
        param.name_of_mine, param.number = name, number
        param._is_hf_initialized = True
    return net


def check(net: Net) -> None:
    for number, (name, param) in enumerate(net.named_parameters()):
        assert (param.name_of_mine, param.number, param._is_hf_initialized) == (name, number, True)
        assert isinstance(param, nn.Parameter)
        assert param.requires_grad == (not name.startswith("frozen"))
    assert net.first.weight.inside == net.marked.inside == "Init"
    assert isinstance(net.marked, Marked) and net.marked.where == "a slot"


def check_real(net: Net) -> None:
    check(net)
    assert not any(param.is_meta for param in net.parameters())


PLACES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "share_parameters": False},
    {"stage": 2, "offload": "cpu"},
    {"stage": 3},
    {"stage": 3, "share_parameters": False},
    {"stage": 3, "precision": "bf16", "units": ["first", "last"], "share_parameters": False},
]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_they_survive_becoming_real(place: dict[str, Any]) -> None:
    net = built()
    check(net)
    before = [id(param) for param in net.parameters()]
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, **place)
    assert [id(param) for param in net.parameters()] == before
    check_real(net)
    for _ in range(2):
        net(torch.ones(2, SIZE, dtype=opt.precision.dtype)).float().sum().backward()
        opt.step()
        opt.zero_grad()
    check_real(net)
    with GatheredParameters(net):
        check_real(net)
        net.first.weight.inside_of_gathered = 1
    assert net.first.weight.inside_of_gathered == 1
    check_real(net)
    opt.close()
    check_real(net)
    kinds = {name: type(param) for name, param in net.named_parameters()}  # sharded parameters have a derived class
    assert {kinds.pop("marked")} == {Marked} and set(kinds.values()) == {nn.Parameter}


@pytest.mark.parametrize("modifier", [None, 0])
def test_they_survive_gathering_before_the_optimizer(modifier: int | None) -> None:
    net, plain = built(), None
    with GatheredParameters(list(net.parameters()), modifier_rank=modifier):
        check_real(net)
        plain = copy.deepcopy(net.state_dict())
        net.first.weight.inside_of_gathered = 1
        net.last.weight._is_hf_initialized = False
        net.last.weight.requires_grad_(requires_grad=False)
        if modifier is not None:
            with torch.no_grad():
                net.marked.mul_(2)
    assert net.first.weight.inside_of_gathered == 1 and not net.last.weight.requires_grad
    assert net.last.weight._is_hf_initialized is False, "what was set inside counts"
    assert net.marked.is_meta == net.first.weight.is_meta == (modifier is None)
    net.last.weight.requires_grad_(requires_grad=True)
    net.last.weight._is_hf_initialized = True
    check(net)
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3)
    check_real(net)
    now = opt.full_state_dict()
    for name, value in plain.items():
        factor = 2 if name == "marked" and modifier is not None else 1
        assert torch.equal(now[name], value * factor), name
    opt.close()


def test_their_hooks_survive() -> None:
    net = built()
    seen: list[str] = []
    handle = net.first.weight.register_hook(lambda grad: seen.append("first"))
    net.marked.register_hook(lambda grad: seen.append("marked") or grad * 0)
    gone = net.last.weight.register_hook(lambda grad: seen.append("last"))
    net.last.weight.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    with GatheredParameters(list(net.parameters())):
        net(torch.ones(2, SIZE)).sum().backward()
        assert sorted(seen) == ["after", "first", "last", "marked"]
        net.zero_grad()
    gone.remove()
    seen.clear()
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=2)
    start = net.marked.detach().clone()
    net(torch.ones(2, SIZE)).sum().backward()
    opt.step()
    opt.zero_grad()
    assert sorted(seen) == ["after", "first", "marked"]
    assert torch.equal(net.marked, start), "the hook made its gradient 0"
    handle.remove()
    seen.clear()
    net(torch.ones(2, SIZE)).sum().backward()
    assert sorted(seen) == ["after", "marked"]
    opt.close()


def test_changes_of_data_of_a_class_of_ones_own_are_errors_too() -> None:
    net = built()
    net.marked.data.mul_(2)
    with pytest.raises(ValueError, match=r"marked was changed after zcomm.zero.Init\(\) had ended"):
        zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3)


def test_weak_references_are_named() -> None:
    net = built()
    watcher = weakref.ref(net.first.weight)
    with pytest.raises(RuntimeError, match=r"shape \(48, 48\) of zcomm.zero.Init\(\) .*weak references"):
        zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3)
    assert watcher() is net.first.weight


def ranks() -> bool:
    zcomm.init(timeout=60)
    net = built()
    with GatheredParameters(list(net.parameters()), modifier_rank=1):
        check_real(net)
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3, share_parameters=False)
    check_real(net)
    opt.close()
    return True


def test_on_two_ranks(run_ranks: Run) -> None:
    assert run_ranks(ranks, 2) == [True, True]


@pytest.mark.parametrize("world_size", [long(1), slow(2)])
def test_transformers_loads_a_model_in_stage_3(world_size: int, tmp_path: Path) -> None:
    """transformers marks loaded parameters by an attribute, and initializes the others randomly."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers and accelerate are not installed")
    script = LIBRARIES / "transformers_stage3.py"
    launcher = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", str(world_size), "--no-prefix", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*launcher, str(tmp_path)], capture_output=True, text=True, timeout=110, env=env)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line.partition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert results == [{"wrong": [], "marked": True, "same": True, "count": 21}] * world_size
