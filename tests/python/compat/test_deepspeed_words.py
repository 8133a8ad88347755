"""deepspeed.utils and the helpers around it: groups, timers, marks, models on a device, logs, ranges."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import zcomm
import zcomm.compat.deepspeed as deepspeed
from zcomm.compat.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from zcomm.compat.deepspeed.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
)
from zcomm.compat.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split_params
from zcomm.compat.deepspeed.utils import OnDevice, instrument_w_nvtx, numa
from zcomm.compat.deepspeed.utils.timer import SynchronizedWallClockTimer, ThroughputTimer, trim_mean


def in_groups() -> Any:
    comm = deepspeed.init_distributed(verbose=False, timeout=60)
    from zcomm.compat.deepspeed import comm as dist
    from zcomm.compat.deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks
    from zcomm.compat.deepspeed.utils import groups

    group = groups._get_data_parallel_group()
    total = torch.ones(2)
    dist.inference_all_reduce(total, group=group)
    part, whole = torch.empty(1), torch.empty(2)
    dist.reduce_scatter_fn(part, torch.tensor([1.0, 2.0]))
    dist.allgather_fn(whole, part)
    assert_ints_same_as_other_ranks([1, 2])
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 1 has \[1\], rank 0 has \[0\]"):
            assert_ints_same_as_other_ranks([comm.rank])
    else:
        assert_ints_same_as_other_ranks([comm.rank])
    found = (
        groups.get_data_parallel_world_size(),
        groups._get_data_parallel_rank() == comm.rank,
        groups._get_sequence_parallel_world_size(),
        dist.get_all_ranks_from_group(dist.get_world_group()),
        total.tolist(),
        whole.tolist(),
    )
    dist.destroy_process_group()
    return found


def test_groups_and_collectives(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(in_groups, 2) == [(2, True, 1, [0, 1], [2.0, 2.0], [2.0, 4.0])] * 2


def test_groups_of_other_kinds_are_refused() -> None:
    from zcomm.compat.deepspeed.utils import groups

    with pytest.raises(NotImplementedError, match=r"\"sequence_parallel_size\" is 1"):
        groups._get_sequence_parallel_group()
    with pytest.raises(AssertionError, match="no group 'ep_size_2' of experts"):
        groups._get_expert_parallel_group("ep_size_2")


def test_timers() -> None:
    timers = SynchronizedWallClockTimer()
    timers("fwd").start()
    time.sleep(0.01)
    timers("fwd").stop(record=True)
    assert timers.get_mean(["fwd", "other"], reset=False)["fwd"] >= 10
    assert timers("fwd").elapsed() >= 10 and timers("fwd").elapsed() == 0
    with pytest.raises(RuntimeError, match="fwd is not started"):
        timers("fwd").stop()
    speed = ThroughputTimer(None, batch_size=4, start_step=1)
    assert speed.avg_samples_per_sec() == float("-inf")
    for _ in range(3):
        speed.start()
        time.sleep(0.005)
        speed.stop(global_step=True)
    assert 0 < speed.avg_samples_per_sec() <= 4 / 0.005


def test_a_model_on_a_device() -> None:
    with OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Linear(4, 4)
    assert model.weight.is_meta and model.weight.dtype == torch.bfloat16
    with OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(4, 4).weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_leaves_and_names_of_modules() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Tanh())
    assert deepspeed.utils.set_z3_leaf_modules(model, [nn.Tanh]) == [model[1]]
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model[1]] and deepspeed.utils.z3_leaf_module(model[1])
    assert deepspeed.utils.unset_z3_leaf_modules(model, ["Tanh"]) == [model[1]]
    assert deepspeed.utils.set_z3_leaf_modules_by_name(model, ["0", "no"], raise_if_not_found=False) == (
        [model[0]],
        ["no"],
    )
    with pytest.raises(ValueError, match="no modules of"):
        deepspeed.utils.set_z3_leaf_modules(model, [nn.Conv2d])
    recursive_setattr(model, "0.0", nn.Identity())
    assert isinstance(recursive_getattr(model, "0.0"), nn.Identity)
    assert has_moe_layers(model) == (False, 0) and not is_moe_param(nn.Parameter(torch.ones(1)))


def test_leaves_are_units_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    deepspeed.utils.set_z3_leaf_modules(model[1:], [nn.Sequential], raise_if_not_found=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 2**18},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    units = engine.optimizer.units
    assert units.leaf == [model[1]] and units.prefetch_bytes == 2**20
    assert "no effect after initialize()" not in caplog.text
    deepspeed.utils.set_z3_leaf_modules_by_name(model, ["0"])
    assert "set_z3_leaf_module(Linear, True) has no effect after initialize()" in caplog.text
    engine.destroy()
    zcomm.shutdown()


def test_groups_of_params() -> None:
    params = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
    group = {"params": iter(params), "name": "all", "lr": 0.5}
    assert split_params(group) == [group] and group["params"] == params
    assert split_params(({"params": params[:1]}, {"params": params[1:]})) == [{"params": [p]} for p in params]
    with pytest.raises(ValueError, match=r"Unknown param group type of .*Parameter"):
        split_params(params[0])  # type: ignore[arg-type]
    cast(Any, params[1]).allreduce = False
    cast(Any, params[1]).group_name = "ep_size_1"
    assert split_params([{"params": params, "lr": 0.5}]) == [
        {"params": params[:1], "lr": 0.5},
        {"params": params[1:], "lr": 0.5, "name": "ep_size_1", "moe": True},
    ]
    assert configure_moe_param_groups(params)[1]["params"] == params[1:]


def test_logging(caplog: pytest.LogCaptureFixture) -> None:
    from zcomm.compat.deepspeed.utils.logging import log_dist_once, logger, set_log_level_from_string, should_log_le

    level = logger.level
    set_log_level_from_string("info")
    assert logger.level == logging.INFO and should_log_le("warning") and not should_log_le("debug")
    for _ in range(2):
        log_dist_once("one time", ranks=[0])
    deepspeed.utils.see_memory_usage("here", force=True)
    assert caplog.text.count("[Rank 0] one time") == 1 and "CPU Virtual Memory: used" in caplog.text
    logger.setLevel(level)


def test_functions_as_ranges_and_lists_of_cores() -> None:
    @instrument_w_nvtx
    def twice(x: int) -> int:
        return 2 * x

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert twice(3) == 6
    assert any("twice" in str(event.name) for event in profile.events())
    assert numa.parse_range_list("0,4-6") == [0, 4, 5, 6]
    with pytest.raises(ValueError, match="do not rise"):
        numa.parse_range_list("4-6,5")
    with pytest.raises(ValueError, match="do not suffice for 3 ranks"):
        numa.get_numactl_cmd("0-1", 3, 0)


def test_gradients_are_replaced_by_a_function() -> None:
    net = nn.Linear(4, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": 2},
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    before = net.weight.detach().clone()
    engine.backward(engine(torch.ones(2, 4)).sum())
    params = list(net.parameters())
    deepspeed.utils.safe_update_full_grad_vectorized(params, lambda gradient, param: torch.full_like(gradient, 0.25))
    engine.step()
    torch.testing.assert_close(net.weight.detach(), before - 0.25)
    with pytest.raises(ValueError, match=r"weight: stage 2 does not shard weights"):
        deepspeed.utils.safe_get_local_grad(net.weight)
    engine.destroy()
    zcomm.shutdown()


def test_a_mean_without_the_ends() -> None:
    values = [3.0, 1.0, 2.0]
    assert trim_mean(values, 0.1) == 2.0 and values == [3.0, 1.0, 2.0]
    assert trim_mean([100.0, *[1.0] * 9], 0.1) == 1.0
