"""deepspeed.runtime and deepspeed.checkpoint: isinstance() by stage, schedules, configurations, estimates, copies."""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.compat.deepspeed import initialize
from zcomm.compat.deepspeed.checkpoint.utils import clone_tensors_for_torch_save, get_zero_ckpt_name_for_rank
from zcomm.compat.deepspeed.comm import destroy_process_group
from zcomm.compat.deepspeed.runtime import base_optimizer, lr_schedules
from zcomm.compat.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from zcomm.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from zcomm.compat.deepspeed.runtime.dataloader import RepeatingLoader
from zcomm.compat.deepspeed.runtime.utils import partition_uniform, required_torch_version
from zcomm.compat.deepspeed.runtime.zero import memory_estimates
from zcomm.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
)
from zcomm.compat.deepspeed.runtime.zero.partition_parameters import Init
from zcomm.compat.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from zcomm.compat.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

MIB = 2**20


@pytest.fixture
def job() -> Iterator[None]:
    yield
    zcomm.shutdown()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_isinstance_answers_by_stage(stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, optimizer, _, _ = initialize(model=nn.Linear(4, 2), config=config)
    answers = {
        base_optimizer.DeepSpeedOptimizer: True,
        base_optimizer.ZeROOptimizer: stage > 0,
        DeepSpeedZeroOptimizer: stage in (1, 2),
        DeepSpeedZeroOptimizer_Stage3: stage == 3,
        BF16_Optimizer: stage == 0,
    }
    for kind, wanted in answers.items():
        assert isinstance(optimizer, kind) is wanted, kind
        assert not isinstance(torch.optim.SGD(nn.Linear(1, 1).parameters()), kind)
        with pytest.raises(NotImplementedError, match="is not made by programs"):
            kind()
    assert hasattr(optimizer, "parameter_offload") is (stage == 3)
    kinds = [OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params]  # as OpenRLHF calls them
    optimizer.offload_states(include=kinds, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=True)
    optimizer.reload_states(non_blocking=True)
    with pytest.raises(ValueError, match="expected some of"):
        optimizer.offload_states(include=["weights"])
    engine.destroy()


def test_the_command_line_chooses_a_schedule() -> None:
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    given = parser.parse_args("--lr_schedule OneCycle --cycle_min_lr 0.5 --cycle_first_step_size 4".split())
    config, reason = lr_schedules.get_config_from_args(given)
    assert reason is None and config is not None and config["type"] == "OneCycle"
    assert config["params"]["cycle_min_lr"] == 0.5 and "cycle_second_step_size" not in config["params"]
    assert lr_schedules.get_lr_from_config(config) == (0.1, "")
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = lr_schedules.OneCycle(optimizer, **config["params"])
    assert schedule.get_mom() == [(0.8, 0.99)]
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert optimizer.param_groups[0]["betas"] == schedule.get_mom()[0] == (pytest.approx(0.8), 0.99)
    assert lr_schedules.get_config_from_args(parser.parse_args([])) == (
        None,
        "--lr_schedule not specified on command line",
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr_range_test_staircase", "perhaps"])
    assert parser.parse_args(["--lr_range_test_staircase", "False"]).lr_range_test_staircase is False


def test_the_ratio_of_a_cosine() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.5)
    schedule = lr_schedules.WarmupCosineLR(optimizer, 10, warmup_num_steps=4, warmup_type="linear")
    assert schedule.get_lr_ratio() == 0.0
    ratios = []
    for _ in range(6):
        optimizer.step()
        schedule.step()
        ratios.append(schedule.get_lr_ratio())
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * ratios[-1])
    # By hand: a line to 1 in 4 steps, then (1 + cos(pi k / 6)) / 2 between 1e-4 and 1.
    assert ratios == pytest.approx([0.0, 0.25, 0.5, 0.75, 0.9330194, 0.7500250], abs=1e-6)


def test_estimates_follow_the_formula_of_the_plan() -> None:
    numel, layer = 1000 * MIB, 10 * MIB
    host, device, whole = memory_estimates.estimate_zero3_model_states_mem_needs(
        numel, layer, 8, 2, additional_buffer_factor=1.0
    )
    assert whole == 2 * 2 * layer
    assert device == 4 * numel // 16 + whole, "fp32 gradients of the shard, and whole units"
    assert host == (2 + 8 + 2) * numel // 2, (
        "bf16 weights, Adam's state and the rest of the exact masters, on two hosts"
    )
    kept = memory_estimates.estimate_zero3_model_states_mem_needs(numel, layer, 8, 2, cpu_offload=False)
    assert kept[1] > device and kept[0] == int(4 * layer * 8 * 1.5)
    host2, device2 = memory_estimates.estimate_zero2_model_states_mem_needs(numel, 4, 1, cpu_offload=False)
    memory = zcomm.zero.memory_formula(numel, 4, 2, "bf16", share_parameters=False)
    assert device2 == sum(memory["device"].values()) and host2 == int(4 * numel * 4 * 1.5)


def test_estimates_of_a_model_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    memory_estimates.estimate_zero3_model_states_mem_needs_all_live(nn.Linear(1024, 1024), 2)
    memory_estimates.estimate_zero2_model_states_mem_needs_all_live(nn.Linear(1024, 1024), 2)
    lines = capsys.readouterr().out.splitlines()
    assert sum("GB |" in line for line in lines) == 6 + 2 and "1M total params, 1M largest layer params." in lines[2]


def test_copies_to_save_hold_no_more_than_they_show() -> None:
    flat = torch.arange(1000.0)
    state = {"a": flat[:4], "list": [flat[4:6], (flat[6:7], "text")], "none": None}
    copy = clone_tensors_for_torch_save(state)
    assert torch.equal(copy["a"], flat[:4]) and copy["none"] is None and copy["list"][1][1] == "text"
    for tensor in (copy["a"], copy["list"][0], copy["list"][1][0]):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    copy["a"].zero_()
    assert flat[1] == 1.0
    assert get_zero_ckpt_name_for_rank("d", 3, 0) == "d/zero_pp_rank_3_mp_rank_00_optim_states.pt"


def test_a_configuration_has_deepspeeds_attributes() -> None:
    config = DeepSpeedConfig(
        {
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 500},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "gradient_clipping": 0.5,
        }
    )
    assert (config.train_batch_size, config.train_micro_batch_size_per_gpu) == (8, 4)
    assert config.zero_enabled and config.zero_config.reduce_bucket_size == 500 and config.zero_config.stage == 2
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("adamw", {"lr": 0.1}, None)
    assert config.gradient_clipping == 0.5
    with pytest.raises(AttributeError, match="no 'no_such' here"):
        _ = config.no_such
    with pytest.raises(DeepSpeedConfigError, match="train_batch_sizes"):
        DeepSpeedConfig({"train_batch_sizes": 8})
    assert DeepSpeedZeroOffloadParamConfig(device="cpu", pin_memory=True).pin_memory is True
    with pytest.raises(ValueError, match="gpu"):
        DeepSpeedZeroOffloadParamConfig(device="gpu")


@pytest.mark.usefixtures("job")
def test_init_joins_the_job() -> None:
    if torch.distributed.is_initialized():
        destroy_process_group()
    with Init(enabled=False):
        assert not torch.distributed.is_initialized()
    with Init(), Init():
        assert torch.distributed.get_world_size() == 1 == zcomm.world_size()
    destroy_process_group()


@pytest.mark.usefixtures("job")
def test_init_refuses_what_it_has_not() -> None:
    with Init(None, None, False, "cpu", True, {"zero_optimization": {"stage": 3}}):
        model = nn.Linear(64, 64)
    assert model.weight.is_meta
    with pytest.raises(NotImplementedError, match=r"zero.Init\(mpu=\): the mpu has 2 model-parallel ranks"):
        Init(mpu=types.SimpleNamespace(get_model_parallel_world_size=lambda: 2))
    for name in ("zero_param_parallel_group", "param_swapper", "zero_quantized_weights"):
        wrong: dict[str, Any] = {name: True}
        with pytest.raises(NotImplementedError, match=rf"zero.Init\({name}=True\) is not available"):
            Init(**wrong)
        Init(enabled=False, **wrong)


def test_small_helpers() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(RepeatingLoader([]))
    assert partition_uniform(7, 3) == [0, 3, 5, 7] and partition_uniform(2, 3) == [0, 1, 2, 2]
    assert required_torch_version("2.1") and not required_torch_version(min_version="99.0")
