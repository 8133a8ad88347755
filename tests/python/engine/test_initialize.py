"""zcomm.initialize: its handling of arguments, and training results that equal torch's."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from places import EXAMPLES

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that initialize() joins."""
    import zcomm

    yield
    zcomm.shutdown()


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))


def batches(steps: int, samples: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))
        for _ in range(steps)
    ]


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])


def train(config: dict[str, Any], steps: int = 5, samples: int = 8, rank: int = 0, world: int = 1, **given: Any) -> Any:
    """Train ``network()``; each step's samples are split over ranks, then into micro-batches, in order."""
    import zcomm

    model = given.pop("model", None) or network()
    dtype = given.pop("dtype", torch.float32)
    engine, *_ = zcomm.initialize(model=model, config=config, **given)
    micro = engine.train_micro_batch_size_per_gpu()
    for x, y in batches(steps, samples):
        mine = slice(rank * samples // world, (rank + 1) * samples // world)
        for xs, ys in zip(x[mine].split(micro), y[mine].split(micro), strict=True):
            engine.backward(F.mse_loss(engine(xs.to(dtype)), ys.to(dtype)))
            engine.step()
    assert engine.global_steps == steps
    return engine


def by_torch(make: Callable[[Any], torch.optim.Optimizer], clip: float | None = None, steps: int = 5) -> torch.Tensor:
    model = network()
    optimizer = make(model.parameters())
    for x, y in batches(steps, 8):
        F.mse_loss(model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_accumulation_is_one_large_batch(job: None) -> None:
    whole = train({"train_batch_size": 8, "optimizer": ADAMW})
    expected = weights(whole.module).clone()
    norm = whole.get_global_grad_norm()
    whole.destroy()
    parts = train({"train_batch_size": 8, "gradient_accumulation_steps": 4, "optimizer": ADAMW})
    assert (parts.train_micro_batch_size_per_gpu(), parts.micro_steps) == (2, 20)
    assert_close(weights(parts.module), expected)
    assert parts.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
    parts.destroy()


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of the paper (arXiv:2302.06675), literally."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * momentum + (1 - beta1) * param.grad).sign()
                param -= lr * (update + group["weight_decay"] * param)
                momentum.copy_(beta2 * momentum + (1 - beta2) * param.grad)


OPTIMIZERS = [
    (ADAMW, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ({"type": "AdamW"}, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.0)),
    ({"type": "Adam", "params": {"weight_decay": 0.1}}, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1)),
    (
        {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}},
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    ),
    ({"type": "AdamW", "params": {"torch_adam": True}}, torch.optim.AdamW),
    (
        {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    (
        {"type": "Lion", "params": {"lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.3}},
        lambda p: Lion(p, lr=0.01, betas=(0.8, 0.9), weight_decay=0.3),
    ),
    ({"type": "Lion"}, lambda p: Lion(p, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0)),
    ({"type": "Adagrad", "params": {"weight_decay": 0.1}}, lambda p: torch.optim.Adagrad(p, weight_decay=0.1)),
    (
        {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.5, 0.6], "eps": 0.1}},
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.6), eps=0.1, weight_decay=0.0),
    ),
]


@pytest.mark.parametrize(("section", "make"), OPTIMIZERS, ids=[str(i) for i in range(len(OPTIMIZERS))])
def test_configured_optimizer_is_torchs(job: None, section: dict[str, Any], make: Any) -> None:
    engine = train({"train_batch_size": 8, "gradient_clipping": 0, "optimizer": section})
    assert_close(weights(engine.module), by_torch(make))
    engine.destroy()


def test_clipping_is_on_by_default_and_does_what_it_says(job: None) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, eps=0.1)

    section = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "eps": 0.1}}
    seen = []
    for keys, clip in (({}, 1.0), ({"gradient_clipping": 0.05}, 0.05), ({"gradient_clipping": 0}, None)):
        engine = train({"train_batch_size": 8, "optimizer": section, **keys})
        seen.append(weights(engine.module).clone())
        assert_close(seen[-1], by_torch(make, clip))
        engine.destroy()
    assert not torch.allclose(seen[1], seen[2], rtol=1e-3)


@pytest.mark.parametrize("kind", ["instance", "class", "callable", "name"])
def test_optimizer_argument(job: None, kind: str) -> None:
    model = network()
    optimizer: Any = {
        "instance": lambda: torch.optim.AdamW(model.parameters(), lr=1e-3),
        "class": lambda: torch.optim.AdamW,
        "callable": lambda: lambda params: torch.optim.AdamW(params, lr=1e-3),
        "name": lambda: "adamw",
    }[kind]()
    engine = train({"train_batch_size": 8, "gradient_clipping": 0}, model=model, optimizer=optimizer)
    assert_close(weights(engine.module), by_torch(torch.optim.AdamW))
    engine.destroy()


def test_argument_beats_the_section_with_a_warning(job: None) -> None:
    import zcomm

    model = network()
    with pytest.warns(UserWarning, match='the section "optimizer" of the configuration is not used'):
        engine, *_ = zcomm.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.5),
            config={"train_batch_size": 8, "optimizer": ADAMW},
        )
    assert engine.get_lr() == [0.5]
    engine.destroy()


def test_a_schedule_that_is_given_beats_the_section_with_a_warning(job: None) -> None:
    import zcomm

    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    with pytest.warns(UserWarning, match='the section "scheduler" of the configuration is not used'):
        engine, _, _, given = zcomm.initialize(
            model=network(),
            lr_scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
            config={"train_batch_size": 8, "optimizer": ADAMW, "scheduler": schedule},
        )
    assert engine.lr_scheduler is given and isinstance(given, torch.optim.lr_scheduler.ExponentialLR)
    assert engine.get_lr() == [0.01]
    engine.destroy()


def test_model_parameters_are_honoured(job: None) -> None:
    model = network()
    start = weights(model).clone()
    groups = [{"params": list(model[0].parameters()), "lr": 0.0, "weight_decay": 0.0}, {"params": [model[2].weight]}]
    engine = train({"train_batch_size": 8, "optimizer": ADAMW}, model=model, model_parameters=groups)
    assert engine.get_lr() == [0.0, 0.01]
    moved = (weights(model) != start).split([6 * 17 + 17, 17 * 3, 3])
    assert [bool(part.any()) for part in moved] == [False, True, False]
    engine.destroy()


def test_configured_schedule(job: None) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": ADAMW, "scheduler": schedule}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = train(config, steps=4)
    assert engine.get_lr() == pytest.approx([0.0075])  # iterations 0..3 of 4, to the optimizer's own lr
    assert engine.lr_scheduler.get_last_lr() == engine.get_lr()
    engine.destroy()


@pytest.mark.parametrize("kind", ["callable", "instance", "sequence"])
def test_schedule_argument(job: None, kind: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)

    def make(of: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(of, step_size=2, gamma=0.5)

    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule: Any = make if kind == "callable" else make(optimizer)
        if kind == "sequence":
            schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [schedule], [])
        engine = train(config, steps=4, model=model, optimizer=optimizer, lr_scheduler=schedule)
    assert engine.get_lr() == [0.25]
    engine.destroy()


def test_returns_deepspeeds_four_things(job: None) -> None:
    import zcomm

    data = TensorDataset(torch.randn(10, 6), torch.randn(10, 3))
    args = argparse.Namespace(deepspeed_config='{"train_batch_size": 4, "optimizer": {"type": "Adam"}}')
    engine, optimizer, loader, schedule = zcomm.initialize(args=args, model=network(), training_data=data)
    assert isinstance(engine, zcomm.Engine) and isinstance(optimizer, zcomm.ZeroOptimizer)
    assert engine.optimizer is optimizer and engine.training_dataloader is loader and schedule is None
    assert [len(x) for x, _ in loader] == [4, 4, 2]
    assert (engine.world_size, engine.global_rank, engine.local_rank) == (1, 0, 0)
    engine.destroy()
    engine, _, loader, _ = zcomm.initialize(model=network(), config_params=args.deepspeed_config)
    assert loader is None
    engine.destroy()


ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": None}, ValueError, "needs model="),
    ({"config": None}, ValueError, "it was given none of them"),
    ({"config_params": {}}, ValueError, "it was given config and config_params"),
    ({"config": {"optimizer": ADAMW}}, ValueError, 'give "train_batch_size"'),
    ({"config": {"train_batchsize": 4}}, ValueError, 'did you mean "train_batch_size"'),
    ({"mpu": object()}, ValueError, "torch.distributed has no process group"),
    ({"mesh_param": (2, 1)}, ValueError, "data=2 x sequence=1"),
    ({"optimizer": 3}, ValueError, "must be a name, a class, an instance or a callable, got 3"),
    ({"optimizer": lambda params: params}, ValueError, "returned list, not a torch.optim.Optimizer"),
    (
        {"lr_scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 1)},
        ValueError,
        "another optim",
    ),
    ({"lr_scheduler": 3}, ValueError, "must be a schedule or a callable"),
    ({"dist_init_required": False}, ValueError, r"zcomm.init\(\) has not been called"),
]


@pytest.mark.filterwarnings("ignore:the section")
@pytest.mark.parametrize(("change", "kind", "message"), ERRORS, ids=[str(i) for i in range(len(ERRORS))])
def test_errors(job: None, change: dict[str, Any], kind: type[Exception], message: str) -> None:
    import zcomm

    good = {"model": network(), "config": {"train_batch_size": 4, "optimizer": ADAMW}}
    with pytest.raises(kind, match=message):
        zcomm.initialize(**{**good, **change})


KEYS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {},
        {"stage": 0, "precision": "fp32", "clip_norm": 1.0, "grad_accum": 1, "overlap": True}
        | {"offload": None, "nvme_path": None, "bucket_mb": None, "lr": 0.01, "weight_decay": 0.1},
    ),
    ({"gradient_accumulation_steps": 2, "gradient_clipping": 0}, {"grad_accum": 2, "clip_norm": None}),
    ({"gradient_clipping": 0.5}, {"clip_norm": 0.5}),
    ({"zero_optimization": {"stage": 2, "overlap_comm": False}}, {"stage": 2, "overlap": False}),
    ({"zero_optimization": {"overlap_comm": True}}, {"overlap": True}),
    ({"zero_optimization": {"reduce_bucket_size": 2**20}}, {"bucket_mb": 4.0}),
    ({"bf16": {"enabled": True}, "zero_optimization": {"reduce_bucket_size": 2**20}}, {"bucket_mb": 2.0}),
    ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, {"offload": ("cpu", None), "nvme_path": None}),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, {"offload": ("cpu", None, 0.5)}),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"stage": 3, "offload": (None, "cpu"), "nvme_path": None},
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "DIR"}}},
        {"offload": ("nvme", None), "nvme_path": "DIR"},
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu", "nvme_path": "DIR"}}},
        {"offload": ("cpu", None), "nvme_path": None},
    ),
]


@pytest.mark.parametrize(("keys", "wanted"), KEYS, ids=[str(i) for i in range(len(KEYS))])
def test_keys_reach_the_optimizer(
    job: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, keys: dict[str, Any], wanted: dict[str, Any]
) -> None:
    import zcomm
    import zcomm.zero

    seen: dict[str, Any] = {}

    class Recorder(zcomm.zero.ZeroOptimizer):
        def __init__(self, model: Any, optimizer: Any, **arguments: Any) -> None:
            seen.update(arguments)
            super().__init__(model, optimizer, **arguments)

    monkeypatch.setattr(zcomm.zero, "ZeroOptimizer", Recorder)
    config = json.dumps({"train_batch_size": 4, "optimizer": ADAMW, **keys}).replace("DIR", str(tmp_path))
    engine, *_ = zcomm.initialize(model=network(), config=config)
    if seen.get("offload") is not None:
        where = seen["offload"]
        seen["offload"] = (where.optimizer, where.params, *([where.fraction] if where.fraction != 1.0 else []))
    if seen.get("nvme_path") is not None:
        seen["nvme_path"] = seen["nvme_path"].replace(str(tmp_path), "DIR")
    assert {name: seen.get(name) for name in wanted} == wanted
    engine.destroy()


def test_fp16_takes_deepspeeds_loss_scale(job: None) -> None:
    keys = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1, "min_loss_scale": 32}
    engine = train({"train_batch_size": 8, "fp16": {"enabled": True, **keys}, "optimizer": ADAMW}, dtype=torch.float16)
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.float16}
    assert engine.optimizer.loss_scale == 2.0**10 and engine.skipped_steps == 0  # 5 steps, doubled after 2 and 4
    whole = train({"train_batch_size": 8, "optimizer": ADAMW})
    torch.testing.assert_close(weights(engine.module), weights(whole.module), rtol=0.05, atol=0.02)
    fixed = train(
        {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 128}, "optimizer": ADAMW},
        1,
        dtype=torch.float16,
    )
    assert fixed.optimizer.loss_scale == 128
    for each in (engine, whole, fixed):
        each.destroy()


def test_an_overflow_at_the_minimum_loss_scale_raises(job: None) -> None:
    import zcomm

    model = network().half()
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 2, "min_loss_scale": 2}
    config = {"train_batch_size": 8, "fp16": fp16, "optimizer": ADAMW}
    engine, *_ = zcomm.initialize(model=model, config=config)
    bias = next(param for name, param in model.named_parameters() if "bias" in name)
    for number, factor in enumerate((float("inf"), float("inf"), 1.0)):
        engine.backward(bias.float().sum() * factor)
        engine.step()
        assert (engine.optimizer.loss_scale, engine.skipped_steps) == ((4, 1), (2, 2), (2, 2))[number]
    before = weights(model)
    engine.backward(bias.float().sum() * float("nan"))
    with pytest.raises(
        RuntimeError, match=r"Current loss scale already at minimum .*step 4: the gradient of .*bias is"
    ):
        engine.step()
    assert engine.skipped_steps == 3
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
    engine.destroy()


def test_bf16_trains(job: None) -> None:
    engine = train({"train_batch_size": 8, "bf16": {"enabled": True}, "optimizer": ADAMW}, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in engine.parameters()} == {torch.bfloat16}
    whole = train({"train_batch_size": 8, "optimizer": ADAMW})
    torch.testing.assert_close(weights(engine.module), weights(whole.module), rtol=0.05, atol=0.02)
    engine.destroy()
    whole.destroy()


def test_a_bad_config_is_found_before_joining() -> None:
    import zcomm

    with pytest.raises(ValueError, match="unknown key"):
        zcomm.initialize(model=network(), config={"stge": 1})
    assert not zcomm.is_initialized()


def test_keys_without_effect_warn_on_rank_0(job: None) -> None:
    import zcomm

    config = {"train_batch_size": 4, "optimizer": ADAMW, "zero_optimization": {"reduce_scatter": False}}
    with pytest.warns(UserWarning, match='"zero_optimization.reduce_scatter": false has no effect') as caught:
        engine, *_ = zcomm.initialize(model=network(), config=config)
    assert len(caught) == 1
    engine.destroy()


def test_deepspeeds_names(job: None) -> None:
    import zcomm
    import zcomm.compat.deepspeed as deepspeed

    comm = deepspeed.init_distributed(dist_backend="gloo", timeout=datetime.timedelta(seconds=20))
    assert comm.world_size == 1 and zcomm.is_initialized()
    assert deepspeed.DeepSpeedEngine is zcomm.Engine
    assert deepspeed.zero.GatheredParameters is zcomm.zero.GatheredParameters
    assert torch.distributed.get_backend() == "zcomm" and deepspeed.comm.get_rank() == 0
    assert deepspeed.comm.get_local_rank() == 0
    deepspeed.init_distributed()  # a second call changes nothing
    deepspeed.comm.destroy_process_group()
    assert not zcomm.is_initialized() and not torch.distributed.is_initialized()
    own_name = deepspeed.get_accelerator().communication_backend_name()
    for name in ("nccl", own_name):  # names in GPU scripts and in DeepSpeed's examples
        assert deepspeed.init_distributed(name).backend == comm.backend
        deepspeed.comm.destroy_process_group()
    with pytest.raises(ValueError, match="hccl"):
        deepspeed.init_distributed("hccl")
    with pytest.raises(ValueError, match="has not been called"):
        deepspeed.init_distributed(dist_init_required=False)


def _rank_weights(config: dict[str, Any]) -> list[float]:
    import zcomm

    comm = zcomm.init()
    model = network()
    engine = train(config, rank=comm.rank, world=comm.world_size, model=model)
    loss = sum(F.mse_loss(engine(x), y).item() for x, y in batches(3, 8))  # reads the trained weights, sharded or not
    engine.destroy()
    zcomm.shutdown()
    return [loss]


ZERO: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "overlap_comm": False},
    {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 64},
    {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
]


@pytest.mark.parametrize("zero", ZERO, ids=lambda zero: f"stage{zero['stage']}")
def test_two_ranks_train_as_one(run_ranks: Any, job: None, tmp_path: Path, zero: dict[str, Any]) -> None:
    zero = dict(zero)
    for tier in ("offload_optimizer", "offload_param"):
        if zero.get(tier, {}).get("device") == "nvme":
            zero[tier] = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 2, "optimizer": ADAMW, "zero_optimization": zero}
    one = train({"train_batch_size": 8, "optimizer": ADAMW})
    wanted = sum(F.mse_loss(one(x), y).item() for x, y in batches(3, 8))
    one.destroy()
    for (loss,) in run_ranks(_rank_weights, 2, config):
        assert loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_example_learns(ranks: int, tmp_path: Path) -> None:
    launcher = [sys.executable] if ranks == 1 else [sys.executable, "-m", "zcomm.cli.main", "run", "-n", str(ranks)]
    command = [*launcher, str(EXAMPLES / "train_ds.py"), "--steps", "40"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # because spinning threads are slow on a busy machine
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1].split()
    loss, entropy = float(last[last.index("loss") + 1]), float(last[-1])
    assert loss < entropy - 0.3, done.stdout
    assert "step 40:" in done.stdout and "samples/s" in done.stdout
