"""deepspeed.monitor and the sections of configurations as DeepSpeed's objects."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcomm.compat.deepspeed.monitor.config import DeepSpeedMonitorConfig, get_monitor_config
from zcomm.compat.deepspeed.monitor.csv_monitor import csvMonitor
from zcomm.compat.deepspeed.monitor.monitor import MonitorMaster
from zcomm.compat.deepspeed.ops.op_builder import ALL_OPS, FusedAdamBuilder
from zcomm.compat.deepspeed.runtime.config import DeepSpeedConfig
from zcomm.compat.deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
from zcomm.compat.deepspeed.runtime.zero.config import (
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)


def test_events_of_the_program(tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "own"}
    monitors = MonitorMaster(get_monitor_config({"train_batch_size": 1, "csv_monitor": section}))
    assert monitors.enabled and monitors.csv_monitor.job_name == "own" and not monitors.tb_monitor.enabled
    monitors.write_events([("Train/loss", 0.5, 8), ("Train/loss", 0.25, 16)])
    written = (tmp_path / "own" / "Train_loss.csv").read_text().split()
    assert written == ["step,loss", "8,0.5", "16,0.25"]


def test_monitors_that_are_off(tmp_path: Path) -> None:
    config = DeepSpeedMonitorConfig(csv_monitor={"output_path": str(tmp_path / "none")})
    assert not config.enabled and not MonitorMaster(config).enabled
    monitor = csvMonitor(config.csv_monitor)
    monitor.write_events([("loss", 1.0, 1)])
    assert not (tmp_path / "none").exists()
    with pytest.raises(AttributeError, match="csvMonitor has no 'writer_of_it'"):
        _ = monitor.writer_of_it
    with pytest.raises(ValueError, match="output_paht"):
        get_monitor_config({"csv_monitor": {"output_paht": "x"}})


def test_sections_of_a_configuration() -> None:
    whole = {"train_batch_size": 1, "bfloat16": {"enabled": True}, "fp16": {"initial_scale_power": 4}}
    assert get_bfloat16_config(whole).enabled and not get_float16_config(whole).enabled
    assert get_float16_config(whole).initial_scale_power == 4
    config = DeepSpeedConfig({"train_batch_size": 1, "wandb": {"project": "own"}})
    assert config.monitor_config.wandb.project == "own"


def test_offload_sections() -> None:
    none = DeepSpeedZeroConfig(offload_param=None)
    assert none.offload_param is None and none.offload_optimizer is None
    old = DeepSpeedZeroConfig(stage=3, cpu_offload=True, cpu_offload_param=True)
    assert isinstance(old.offload_optimizer, DeepSpeedZeroOffloadOptimizerConfig)
    assert isinstance(old.offload_param, DeepSpeedZeroOffloadParamConfig)
    assert old.offload_optimizer.device == old.offload_param.device == "cpu"
    named = DeepSpeedZeroConfig(stage3_gather_fp16_weights_on_model_save=True, stage3_prefetch_bucket_size=12)
    assert named.gather_16bit_weights_on_model_save is True and named.prefetch_bucket_size == 12
    assert DeepSpeedZeroConfig(offload_optimizer={"device": "cpu", "ratio": 0.5}).offload_optimizer.ratio == 0.5


def test_names_of_builders() -> None:
    assert FusedAdamBuilder.NAME == "fused_adam"
    assert all(name == type(builder).NAME for name, builder in ALL_OPS.items())
