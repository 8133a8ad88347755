"""Generation with weights that are gathered once, as TRL does it: ranks may run the model differently often."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.compat.deepspeed as deepspeed


def remove_hooks(engine: Any) -> None:
    """Remove hooks as TRL's function of this name does."""
    offload = engine.optimizer.parameter_offload
    module = offload.module
    for _, param in itertools.chain(module.named_parameters(recurse=True), module.ds_external_parameters()):
        param.ds_active_sub_modules.clear()
    for hook in (*offload.forward_hooks, *offload.backward_hooks):
        hook.remove()
    offload.forward_hooks = []
    offload.backward_hooks = []


def add_hooks(engine: Any) -> None:
    offload = engine.optimizer.parameter_offload
    assert not hasattr(offload, "param_coordinator")
    offload._register_deepspeed_module(offload.module)


def train_and_generate(way: str) -> tuple[list[float], list[float]]:
    """Return the losses of steps, and sums of the outputs generated between them, by ``way``."""
    comm = zcomm.init(timeout=60)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": 3 if way != "stage 0" else 0},
    }
    if way != "stage 0":  # by units: each rank keeps a shard
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    engine = deepspeed.initialize(model=net, config=config)[0]
    x = torch.full((2, 8), 0.5 + comm.rank)
    losses, made = [], []

    def generate(model: nn.Module) -> None:
        with torch.no_grad():
            y = torch.ones(1, 8)
            for _ in range(2 + 3 * comm.rank):
                y = model(y)
            made.append(float(y.sum()))

    for _ in range(3):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if way == "TRL":
            with deepspeed.zero.GatheredParameters(engine.parameters()):
                remove_hooks(engine)
                generate(engine.module)
                add_hooks(engine)
        elif way == "DeepSpeed":
            with deepspeed.zero.unwrap_model_for_generation(engine) as model:
                generate(model.module)
        else:
            generate(engine.module)
    engine.destroy()
    zcomm.shutdown()
    return losses, made


@pytest.mark.parametrize("way", ["TRL", "DeepSpeed"])
def test_generating_is_that_of_stage_0(run_ranks: Callable[..., list[Any]], way: str) -> None:
    wanted = run_ranks(train_and_generate, 2, "stage 0")
    found = run_ranks(train_and_generate, 2, way)
    for one, other in zip(wanted, found, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            assert theirs == pytest.approx(mine, rel=1e-6)
    assert wanted[0][1] != wanted[1][1], "ranks generate differently long"
