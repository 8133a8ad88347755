"""deepspeed.utils' functions of whole tensors, called in a loop over all parameters, including frozen ones."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.compat.deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)


def engine_of(stage: int, **more: Any) -> Any:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    net[1].requires_grad_(requires_grad=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **more,
    }
    return zcomm.initialize(model=net, config=config)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loop_over_all_parameters(stage: int) -> None:
    engine = engine_of(stage)
    engine.backward(engine(torch.ones(2, 4)).sum())
    for name, param in engine.module.named_parameters():
        gradient = safe_get_full_grad(param)
        assert (gradient is None) == name.startswith("1."), name
        if gradient is not None:
            safe_set_full_grad(param, value=2 * gradient)
            assert torch.equal(safe_get_full_grad(param), 2 * gradient)
    engine.step()
    for name, param in engine.module.named_parameters():
        assert safe_get_full_grad(param) is None
        whole = safe_get_full_fp32_param(param)
        safe_set_full_fp32_param(param, value=whole + 1)
        assert torch.equal(safe_get_full_fp32_param(param), whole + 1)
        state = safe_get_full_optimizer_state(param, optim_state_key="exp_avg")
        assert (state is None) == name.startswith("1."), name
        if state is not None:
            safe_set_full_optimizer_state(param, value=state + 1, optim_state_key="exp_avg")
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), state + 1)
    with pytest.raises(ValueError, match="is not trained"):
        safe_set_full_grad(engine.module[1].weight, torch.zeros(8, 8))
    with pytest.raises(ValueError, match="exp_avg, exp_avg_sq"):
        safe_get_full_optimizer_state(engine.module[0].weight, "momentum")
    engine.destroy()


def in_no_sync(stage: int) -> None:
    comm = zcomm.init(timeout=60)
    engine = engine_of(stage, gradient_accumulation_steps=2)
    x = torch.full((2, 4), 1.0 + comm.rank)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    plain.load_state_dict(engine.optimizer.full_state_dict())
    plain(x).sum().backward()
    wanted = plain[0].weight.grad
    weight = engine.module[0].weight
    with engine.no_sync():
        engine.backward(engine(x).sum())
        torch.testing.assert_close(safe_get_full_grad(weight), wanted / 2)
        engine.step()
        assert safe_get_full_grad(engine.module[1].weight) is None
    engine.backward(engine(x).sum())
    mean = wanted.clone()
    comm.all_reduce(mean, op="avg")
    torch.testing.assert_close(safe_get_full_grad(weight), mean)
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_inside_of_no_sync_it_is_this_ranks_sum(run_ranks: Callable[..., list[Any]], stage: int) -> None:
    run_ranks(in_no_sync, 2, stage)


def test_parameters_of_no_engine() -> None:
    engine = engine_of(1)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="is not a parameter of an open ZeroOptimizer"):
        safe_get_full_grad(other.weight)
    other(torch.ones(1, 2)).sum().backward()
    assert safe_get_full_grad(other.weight) is other.weight.grad, "of a model that torch trains alone"
    engine.destroy()


KINDS = {
    "master": (safe_get_local_fp32_param, safe_set_local_fp32_param, safe_get_full_fp32_param),
    "gradient": (safe_get_local_grad, safe_set_local_grad, safe_get_full_grad),
    "state": (
        lambda param: safe_get_local_optimizer_state(param, "exp_avg"),
        lambda param, value: safe_set_local_optimizer_state(param, value, "exp_avg"),
        lambda param: safe_get_full_optimizer_state(param, "exp_avg"),
    ),
}


def parts_of_ranks(folder: str) -> None:
    """Read and set this rank's parts: together they are the whole tensors, and the step uses the values set."""
    importlib.import_module("zcomm.compat.deepspeed.runtime.zero.partition_parameters")  # ds_tensor
    comm, nvme = zcomm.init(), {"device": "nvme", "nvme_path": folder}
    for precision, tier in itertools.product(({}, {"bf16": {"enabled": True}}), ({"device": "none"}, nvme)):
        engine = engine_of(
            3, **precision, zero_optimization={"stage": 3, "offload_param": tier, "offload_optimizer": tier}
        )
        ones = torch.ones(2, 4, dtype=next(engine.module.parameters()).dtype)
        for step in (True, False):
            engine.backward(engine(ones).float().square().sum())
            if step:
                engine.step()
        wanted = {}
        for name, param in engine.module.named_parameters():
            if name.startswith("1."):  # frozen
                for read, write, _ in KINDS.values():
                    assert read(param) is None
                    write(param, torch.ones(1))
                continue
            count = param.ds_tensor.numel()
            counts = comm.all_gather(torch.tensor([count])).tolist()
            assert sum(counts) == param.numel()
            begin = sum(counts[: comm.rank])
            new = torch.full((count,), 0.25 * (comm.rank + 1))
            wanted[name] = torch.cat([torch.full((n,), 0.25 * (rank + 1)) for rank, n in enumerate(counts)])
            for kind, (read, write, whole) in KINDS.items():
                assert torch.equal(read(param), whole(param).reshape(-1)[begin : begin + count]), (name, kind)
                write(param, new)
                assert torch.equal(read(param), new), (name, kind)
                assert torch.equal(whole(param), wanted[name].view(param.ds_shape)), (name, kind)
                with pytest.raises(ValueError, match=f"the value has {count + 1} elements, this rank keeps {count}"):
                    write(param, torch.ones(count + 1))
        engine.step()
        for name, value in wanted.items():  # gradient and moment had the same value
            moment = safe_get_full_optimizer_state(engine.module.get_parameter(name), "exp_avg")
            torch.testing.assert_close(moment.reshape(-1), value)
        engine.destroy()


@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3)])
def test_parts_of_ranks(run_ranks: Callable[..., list[Any]], tmp_path: Path, world_size: int) -> None:
    run_ranks(parts_of_ranks, world_size, str(tmp_path))
