"""Optimizers by name in the configuration: torch's elementwise classes train as torch does, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zcomm

Run = Callable[..., list[Any]]
KINDS: dict[str, dict[str, Any]] = {
    "RMSprop": {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True, "weight_decay": 0.1},
    "Adadelta": {"lr": 1.0, "rho": 0.8},
    "Adamax": {"lr": 0.01, "betas": (0.8, 0.9)},
    "NAdam": {"lr": 0.01, "momentum_decay": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True},
    "RAdam": {"lr": 0.05, "betas": (0.8, 0.9)},
    "ASGD": {"lr": 0.05, "lambd": 0.01, "alpha": 0.6, "t0": 2.0},
    "Rprop": {"lr": 0.01, "etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0)},
}
PLACES = [(0, None), (1, "cpu"), (2, "nvme"), (3, None)]
STEPS = 4


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that initialize() joins."""
    yield
    zcomm.shutdown()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def loss_of(model: Any, number: int, rank: int) -> torch.Tensor:
    x = torch.randn(2, 9, generator=torch.Generator().manual_seed(100 * number + rank))
    return F.mse_loss(model(x[:, :6]), x[:, 6:])


def config(kind: str, stage: int, device: str | None, folder: str, **params: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if device is not None:
        zero["offload_optimizer"] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    params = {key: list(value) if isinstance(value, tuple) else value for key, value in params.items()}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": kind, "params": params},
        "zero_optimization": zero,
    }


def trained(folder: str, in_groups: bool) -> dict[str, list[torch.Tensor]]:
    rank, ends = zcomm.init().rank, {}
    for kind, params in KINDS.items():
        ends[kind] = []
        for stage, device in PLACES:
            net = network()
            groups = None if not in_groups else [{"params": [p]} for p in net.parameters()]
            settings = config(kind, stage, device, folder, **params)
            engine = zcomm.initialize(model=net, model_parameters=groups, config=settings)[0]
            assert engine.optimizer.rule.name == kind.lower()
            for step in range(STEPS):
                engine.backward(loss_of(engine, step, rank))
                engine.step()
            ends[kind].append(torch.cat([value.flatten() for value in engine.module_state_dict().values()]))
            engine.destroy()
    return ends


def by_torch(kind: str, ranks: int) -> torch.Tensor:
    net = network()
    optimizer = getattr(torch.optim, kind)(net.parameters(), **KINDS[kind])
    for step in range(STEPS):
        (sum(loss_of(net, step, rank) for rank in range(ranks)) / ranks).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


@pytest.mark.parametrize(("world_size", "in_groups"), [(1, True), (2, False)])
def test_torch_classes_by_name_train_as_torch(run_ranks: Run, tmp_path: Path, world_size: int, in_groups: bool) -> None:
    for ends in run_ranks(trained, world_size, str(tmp_path), in_groups):
        for kind, weights in ends.items():
            for each in weights:
                torch.testing.assert_close(each, by_torch(kind, world_size), rtol=1e-5, atol=1e-6)


REFUSED = {
    "FusedLamb": r"zcomm.optim.Lamb \(type Lamb\)",
    "Adafactor": "factors the second moment",
    "LBFGS": "searches along lines",
    "SparseAdam": "sparse gradients",
    "AdamW8bit": "quantised in blocks of its own kernels",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_elementwise_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(NotImplementedError, match=f'"optimizer.type": "{kind}" is refused: .*{REFUSED[kind]}'):
        zcomm.initialize(model=network(), config=config(kind, 0, None, ""))


ONE_BIT: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 3, "cuda_aware": False, "comm_backend_name": "nccl", "weight_decay": 0.1},
    "ZeroOneAdam": {"var_freeze_step": 4, "var_update_scaler": 1, "local_step_scaler": 2, "local_step_clipper": 2},
    "OneBitLamb": {"freeze_step": 3, "max_coeff": 5.0, "factor_threshold": 0.2, "coeff_beta": 0.8},
}


def one_bit(kind: str, in_groups: bool, params: dict[str, Any]) -> torch.Tensor:
    rank, net = zcomm.init().rank, network()
    groups = [{"params": [p]} for p in net.parameters()] if in_groups else None
    engine = zcomm.initialize(model=net, model_parameters=groups, config=config(kind, 0, None, "", **params))[0]
    for step in range(8):
        engine.backward(loss_of(engine, step, rank))
        engine.step()
    ends = torch.cat([value.flatten() for value in engine.module_state_dict().values()])
    assert engine.optimizer._parts.reducer.stays_local
    engine.destroy()
    return ends


@pytest.mark.parametrize("kind", ONE_BIT)
def test_one_bit_optimizers_by_name(run_ranks: Run, kind: str) -> None:
    params = {"lr": 0.01, **ONE_BIT[kind]}
    every = [end for in_groups in (True, False) for end in run_ranks(one_bit, 2, kind, in_groups, params)]
    if kind == "OneBitLamb":  # all moments are one flat tensor, in the order of the param groups
        assert torch.equal(every[0], every[1]) and torch.equal(every[2], every[3])
    else:
        assert all(torch.equal(end, every[0]) for end in every)
    with pytest.raises(ValueError, match=r'"zero_optimization.stage": 1|stage=1'):
        zcomm.initialize(model=network(), config=config(kind, 1, None, ""))
    zcomm.shutdown()


def one_bit_instances() -> list[str]:
    from zcomm.compat.deepspeed.runtime.fp16 import onebit

    found, rank = [], zcomm.init().rank
    for make, options in (
        (onebit.OnebitAdam, {"freeze_step": 2}),
        (onebit.ZeroOneAdam, {"var_freeze_step": 2}),
        (onebit.OnebitLamb, {"freeze_step": 2, "factor_max": 3.0}),
    ):
        net = network()
        optimizer = make(net.parameters(), lr=0.01, **options)
        engine = zcomm.initialize(model=net, optimizer=optimizer, config={"train_micro_batch_size_per_gpu": 2})[0]
        for step in range(4):
            engine.backward(loss_of(engine, step, rank))
            engine.step()
        found.append(engine.optimizer.rule.name)
        assert all(engine.optimizer.param_groups[0][key] == value for key, value in options.items())
        engine.destroy()
        with pytest.raises(NotImplementedError, match="amsgrad=True"):
            make(net.parameters(), amsgrad=True)
    return found


def test_one_bit_classes_take_arguments_in_deepspeeds_order() -> None:
    from zcomm.compat.deepspeed.runtime.fp16 import onebit

    params, betas = [torch.zeros(1)], (0.5, 0.6)
    common = (False, betas, 1e-6, False, 0.1, 0.0)
    for made, last in (
        (onebit.OnebitAdam(params, None, 0.5, 7, *common, False, True, "mpi"), {"freeze_step": 7}),
        (onebit.ZeroOneAdam(params, None, 0.5, *common, 7, 8, 9, 10, False), {"local_step_clipper": 10}),
        (onebit.OnebitLamb(params, None, 0.5, 7, *common, 9.0, 0.1, False, True, "mpi", 0.5), {"coeff_beta": 0.5}),
    ):
        wanted = {"lr": 0.5, "bias_correction": False, "betas": betas, "eps": 1e-6, "weight_decay": 0.1, **last}
        assert all(made.defaults[key] == value for key, value in wanted.items())


def test_one_bit_instances_of_deepspeeds_classes(run_ranks: Run) -> None:
    assert run_ranks(one_bit_instances, 2)[0] == ["onebit_adam", "zero_one_adam", "onebit_lamb"]


def test_a_param_of_another_type_is_an_error() -> None:
    with pytest.raises(ValueError, match=r'"optimizer.params.alpha": Adamax has no such param; it has lr'):
        zcomm.initialize(model=network(), config=config("Adamax", 0, None, "", alpha=0.9))


def test_muon_keeps_the_options_of_param_groups(job: None) -> None:
    net = network()
    groups = [
        {"params": net[0].parameters(), "lr": 1e-2, "weight_decay": 0.1, "mark": "first"},
        {"params": (p for p in net[2].parameters()), "lr": 0.0, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    ]
    muon = config("Muon", 2, None, "", lr=5e-4, weight_decay=0.01, momentum=0.8)
    engine, optimizer, *_ = zcomm.initialize(model=net, model_parameters=groups, config=muon)
    assert [
        (g["use_muon"], g["lr"], g["weight_decay"], g.get("mark"), g["momentum"] if g["use_muon"] else g["betas"])
        for g in optimizer.param_groups
    ] == [
        (True, 1e-2, 0.1, "first", 0.8),
        (False, 1e-2, 0.1, "first", (0.9, 0.95)),
        (True, 0.0, 0.0, None, 0.8),
        (False, 0.0, 0.0, None, (0.5, 0.9)),
    ]
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    engine.backward(loss_of(engine, 0, 0))
    engine.step()
    moved = [name for name, param in net.named_parameters() if not torch.equal(param, before[name])]
    assert moved == ["0.weight", "0.bias"], "a group with lr 0 stays"
    engine.destroy()


@pytest.mark.parametrize("kind", ["AdamW", "Muon"])
def test_parameters_that_can_be_read_once_or_are_none(job: None, kind: str) -> None:
    net = network()
    settings = config(kind, 2, None, "", lr=1e-2)
    for given in (net.parameters(), iter([{"params": net[0].weight}, {"params": iter([net[2].weight])}])):
        engine, optimizer, *_ = zcomm.initialize(model=net, model_parameters=given, config=settings)
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        assert {id(net[0].weight), id(net[2].weight)} <= params
        engine.destroy()
    for given, words in (
        (net.named_parameters(), r"element 0 is a tuple; give parameters \(not named_parameters\(\)\)"),
        ({"params": net.parameters()}, "element 0 is a str"),
        ([net[0].weight, {"params": [net[2].weight]}], "both param groups and parameters"),
    ):
        with pytest.raises(ValueError, match=f"model_parameters.*{words}"):
            zcomm.initialize(model=net, model_parameters=given, config=settings)


class AdamW8bit(torch.optim.AdamW):
    """A class with the name and package of bitsandbytes' class."""


AdamW8bit.__module__ = "bitsandbytes.optim.adamw"


def test_instances_that_are_not_elementwise_are_refused_with_the_reason(job: None) -> None:
    net = network()
    for optimizer, why in (
        (torch.optim.Adafactor(net.parameters()), "factors the second moment"),
        (torch.optim.LBFGS(net.parameters()), "searches along lines"),
        (AdamW8bit(net.parameters()), "quantised in blocks of its own kernels"),
    ):
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__}' is not available: .*{why}"):
            zcomm.initialize(model=net, optimizer=optimizer, config={"train_batch_size": 2})
