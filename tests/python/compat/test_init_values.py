"""``deepspeed.zero.Init`` before ``initialize``: rank 0's values, ``ds_id`` of all parameters, None among them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zcomm
import zcomm.compat.deepspeed as deepspeed

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 4, bias=False))


def opened(model: nn.Module) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [param.detach().clone() for param in model.parameters()]


def seeds_by_rank() -> list[Any]:
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    found: list[Any] = []
    for in_memory in (False, True):
        torch.manual_seed(10 + rank)
        if in_memory:
            model = net()
            deepspeed.zero.Init(module=model, config_dict_or_path=CONFIG)
        else:
            with deepspeed.zero.Init(config_dict_or_path=CONFIG), deepspeed.zero.Init(config_dict_or_path=CONFIG):
                model = net()
        params = list(model.parameters())
        assert len({param.ds_id for param in params}) == len(params) == 3
        assert [param.ds_status.name == "AVAILABLE" for param in params] == [in_memory, True, True]
        assert [param.ds_numel for param in params] == [1600, 40, 160]
        small = [param.detach().clone() for param in params[1:]]  # without a context
        seen, twin = opened(model), copy.deepcopy(model)
        assert all(torch.equal(*pair) for pair in zip(small, seen[1:], strict=True))
        with deepspeed.zero.GatheredParameters([model[1].weight, model[1].bias], modifier_rank=0):
            if rank == 0:
                model[1].weight.data.fill_(0.5)
        with deepspeed.zero.GatheredParameters(model[1].bias):  # None
            assert bool((model[1].weight == 0.5).all())
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
        other, *_ = deepspeed.initialize(model=twin, model_parameters=twin.parameters(), config=CONFIG)
        assert [torch.equal(*pair) for pair in zip(seen, opened(twin), strict=True)] == [True] * 3
        assert [torch.equal(*pair) for pair in zip(seen, opened(model), strict=True)] == [True, True, False]
        found.append([value.tolist() for value in seen])
        engine.destroy()
        other.destroy()
    zcomm.shutdown()
    return found


def test_values_before_initialize_are_those_of_rank_0(run_ranks: Callable[..., list[Any]]) -> None:
    torch.manual_seed(10)
    want = [param.tolist() for param in net().parameters()]
    assert run_ranks(seeds_by_rank, 2) == [[want, want]] * 2
