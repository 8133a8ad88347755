""" "auto" in a configuration, as Hugging Face's examples have it, and the section activation_checkpointing."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import types
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zcomm.compat.deepspeed as deepspeed
from zcomm.config import ConfigWarning, load
from zcomm.engine.auto import auto_values

HUGGING_FACE: dict[str, Any] = {  # its example for stage 3, without the offload sections
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
ARGS = Namespace(
    per_device_train_batch_size=2,
    gradient_accumulation_steps=3,
    max_grad_norm=0.25,
    learning_rate=5e-3,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_epsilon=1e-6,
    weight_decay=0.125,
    warmup_steps=0,
    warmup_ratio=0.1,
    max_steps=45,
    fp16=False,
    bf16=True,
)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def test_arguments_fill_in_a_whole_file() -> None:
    engine, optimizer, _, scheduler = zcomm.initialize(args=ARGS, model=net(), config=HUGGING_FACE)
    assert engine.train_micro_batch_size_per_gpu() == 2 and engine.gradient_accumulation_steps() == 3
    assert engine.train_batch_size() == 6
    config, group = engine.config, optimizer.param_groups[0]
    assert config.bf16.enabled and not config.fp16.enabled and config.gradient_clipping == 0.25
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-6, 0.125)
    assert config.optimizer is not None and config.optimizer.params.lr == 5e-3
    params = config.scheduler.params
    assert (params.total_num_steps, params.warmup_num_steps, params.warmup_max_lr) == (45, 5, 5e-3)
    assert scheduler is not None and config.zero_optimization.reduce_bucket_size is None
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().sum())
        engine.step()
    assert engine.global_steps == 1
    engine.destroy()


@pytest.mark.parametrize("epochs", [3, 2.5])
def test_epochs_become_steps(epochs: float) -> None:
    args = Namespace(**{**vars(ARGS), "max_steps": -1, "num_train_epochs": epochs})
    data = [(torch.ones(8, dtype=torch.bfloat16), 0) for _ in range(41)]  # 21 micro-batches, 3 for each step
    engine, optimizer, loader, _ = zcomm.initialize(args=args, model=net(), config=HUGGING_FACE, training_data=data)
    params = engine.config.scheduler.params
    assert loader is not None and len(loader) == 21
    assert params.total_num_steps == {3: 21, 2.5: 17}[epochs]
    assert params.warmup_num_steps == {3: 3, 2.5: 2}[epochs], "a tenth, rounded up"
    for _ in range(3):
        for x, _ in loader:
            engine.backward(engine(x).float().sum())
            engine.step()
    assert engine.global_steps == 21 and optimizer.param_groups[0]["lr"] <= 5e-3 / 18, "it ends with the training"
    engine.destroy()
    with pytest.raises(
        ValueError, match=r'needs "scheduler.params.total_num_steps"; "auto" is args.max_steps, or the st'
    ):
        zcomm.initialize(args=args, model=net(), config=HUGGING_FACE)  # the length of an epoch is unknown
    said = Namespace(**{**vars(args), "max_steps": 9})
    engine, *_ = zcomm.initialize(args=said, model=net(), config=HUGGING_FACE, training_data=data)
    assert engine.config.scheduler.params.total_num_steps == 9, "max_steps goes first"
    engine.destroy()


@pytest.mark.parametrize(
    ("dtype", "fp16", "bf16"),
    [(torch.float32, False, False), (torch.bfloat16, False, True), (torch.float16, True, False)],
)
def test_the_model_tells_the_precision(dtype: torch.dtype, fp16: bool, bf16: bool) -> None:
    source = {"train_batch_size": 1, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}
    config = load(source, auto_values(None, net(dtype), None, source))
    assert (config.fp16.enabled, config.bf16.enabled) == (fp16, bf16)
    said = load(source, auto_values(Namespace(bf16=True), net(dtype), None, source))
    assert (said.fp16.enabled, said.bf16.enabled) == (False, True), "arguments go first"


def test_without_arguments_defaults_and_the_optimizers_rate() -> None:
    source: dict[str, Any] = {
        **HUGGING_FACE,
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.125, "betas": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}},
    }
    config = load(source, auto_values(None, net(), None, source))
    plain = load({"train_batch_size": 8})
    assert config.scheduler is not None and config.scheduler.params.warmup_max_lr == 0.125
    assert config.gradient_clipping == plain.gradient_clipping and config.gradient_accumulation_steps is None
    given = torch.optim.SGD(net().parameters(), lr=0.75)
    config = load(source, auto_values(None, net(), given, source))
    assert config.scheduler is not None and config.scheduler.params.warmup_max_lr == 0.75
    with pytest.raises(ValueError, match='"train_batch_size" or "train_micro_batch_size_per_gpu"'):
        zcomm.initialize(model=net(), config={"train_batch_size": "auto", "optimizer": {"type": "AdamW"}})


def test_sizes_that_contradict_the_arguments() -> None:
    config = {**HUGGING_FACE, "train_batch_size": 7}
    with pytest.raises(ValueError, match="2 x 3 x 1 = 6"):
        zcomm.initialize(args=ARGS, model=net(), config=config)


def test_training_arguments_have_these_names() -> None:
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("accelerate") is None:
        pytest.skip("transformers and accelerate are not installed")
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert set(vars(ARGS)) - {"warmup_ratio"} <= names, "which transformers 5 has in warmup_steps"


@pytest.mark.parametrize(
    ("steps", "ratio", "want"),
    [(7, 0.5, 7), (0, 0.0, 1), (0, 0.3, 14), (None, None, None), (0.3, None, 14), (7.0, 0.5, 7)],
)
def test_warm_up(steps: float | None, ratio: float | None, want: int | None) -> None:
    args = Namespace(warmup_steps=steps, warmup_ratio=ratio, max_steps=45)
    assert auto_values(args, net(), None, {})["scheduler.params.warmup_num_steps"] == want
    assert math.ceil(0.3 * 45) == 14


# --- activation checkpointing -----------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=False)
        return x


def trained(section: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 1100,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "activation_checkpointing": section,
    }
    engine, optimizer, _, _ = zcomm.initialize(model=Deep(), config=config)
    for step in range(2):
        x = torch.randn(1100, 256, generator=torch.Generator().manual_seed(step), requires_grad=True)
        engine.backward(engine(x).square().mean())
        engine.step()
    with torch.no_grad():
        engine(torch.ones(1100, 256))
    weights, offload = optimizer.full_state_dict(), engine._offload
    stats = None if offload is None else offload.stats()
    engine.destroy()
    assert offload is None or offload.stats()["buffer_nbytes"] == 0
    return weights, stats


def test_cpu_checkpointing() -> None:
    plain, nothing = trained({})
    weights, stats = trained({"cpu_checkpointing": True})
    assert nothing is None
    assert stats["offloaded_count"] == 2 * 3, "inputs of three blocks, from 1 MiB on"
    assert stats["peak_nbytes"] == 3 * 1100 * 256 * 4 and stats["offloaded_nbytes"] == 0
    assert all(torch.equal(weights[name], value) for name, value in plain.items())


def test_what_has_no_effect_is_said() -> None:
    with pytest.warns(ConfigWarning, match=r"activation_checkpointing\.partition_activations.*one such rank"):
        load({"train_batch_size": 1, "activation_checkpointing": {"partition_activations": True}})


@pytest.mark.parametrize("on_host", [False, True])
def test_deepspeeds_checkpoint(on_host: bool) -> None:
    checkpointing = deepspeed.checkpointing
    assert not checkpointing.is_configured()
    section = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": on_host}}
    checkpointing.configure(None, deepspeed_config=section)
    assert checkpointing.is_configured()
    layer, x = nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    y = checkpointing.checkpoint(lambda x: torch.tanh(layer(x)), x)
    if on_host:
        assert checkpointing._offload.stats()["offloaded_nbytes"] == 4 * 16 * 4
    y.sum().backward()
    grad, x.grad = x.grad, None
    torch.tanh(layer(x)).sum().backward()
    assert torch.equal(grad, x.grad)
    checkpointing.reset()
    assert not checkpointing.is_configured()
    with pytest.raises(NotImplementedError, match=r"mpu_=\): the mpu has 2 model-parallel ranks"):
        checkpointing.configure(types.SimpleNamespace(get_model_parallel_world_size=lambda: 2))
