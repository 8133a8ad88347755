"""LAMB: DeepSpeed's formula in float64, and the same bits in every stage, tier and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zcomm
from zcomm.compat.deepspeed.ops.lamb import FusedLamb
from zcomm.optim import lamb
from zero_jobs import digest

Run = Callable[..., list[Any]]
STEPS = 5


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one."""
    yield
    zcomm.shutdown()


def network() -> nn.Sequential:
    """Build a model with a last bias of zeros."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 70), nn.LayerNorm(70), nn.Linear(70, 5))
    nn.init.zeros_(net[4].bias)
    return net


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim == 1], "lr": 5e-3, "max_coeff": 0.9},
    ]


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(6, 24, generator=generator), torch.randn(6, 5, generator=generator)
    return nn.functional.mse_loss(model(x.to(dtype)).to(max(dtype, torch.float32, key=lambda t: t.itemsize)), y)


class Lamb64:
    """The formula, implemented again for whole float64 parameters."""

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        defaults: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        defaults |= {"bias_correction": True, "eps_inside_sqrt": False, "max_coeff": 10.0, "min_coeff": 0.01}
        self.groups = [{**defaults, **options, **group} for group in groups]
        self.state: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.groups:
            (b1, b2), eps = group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                t, m, v = self.state.get(p, (0, 0.0, 0.0))
                t, m, v = t + 1, b1 * m + (1 - b1) * p.grad, b2 * v + (1 - b2) * p.grad**2
                self.state[p] = t, m, v
                u = m / ((v + eps) ** 0.5 if group["eps_inside_sqrt"] else v**0.5 + eps) + group["weight_decay"] * p
                r = 1.0
                if p.norm() > 0 and u.norm() > 0:
                    r = min(max(float(p.norm() / u.norm()), group["min_coeff"]), group["max_coeff"])
                lr = group["lr"]
                if group["bias_correction"]:
                    lr = lr * (1 - b2**t) ** 0.5 / (1 - b1**t)
                p -= lr * r * u


OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02, "betas": (0.8, 0.95)},
    {"lr": 0.02, "weight_decay": 0.3, "bias_correction": False},
    {"lr": 0.02, "eps": 1e-4, "eps_inside_sqrt": True},
    {"lr": 0.02, "max_coeff": 0.5},
    {"lr": 0.02, "min_coeff": 0.85},
]


def reference(options: dict[str, Any], ranks: int = 1, clip: float | None = None) -> dict[str, torch.Tensor]:
    model = network().double()
    opt = Lamb64(groups(model), **options)
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(model, step, rank, torch.float64) / ranks).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        model.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def assert_near(weights: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    for name, value in exact.items():
        distance = float((weights[name].double() - value).norm() / value.norm())
        assert distance < 1e-5, f"{name}: {distance}"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_class_alone_is_the_formula(options: dict[str, Any]) -> None:
    model = network()
    opt = zcomm.optim.Lamb(groups(model), **options)
    for step in range(STEPS):
        loss_of(model, step, 0).backward()
        opt.step()
        opt.zero_grad()
    assert_near({name: value.detach() for name, value in model.named_parameters()}, reference(options))


@pytest.mark.parametrize("inside", [False, True])
def test_a_direction_is_rounded_operation_by_operation(inside: bool) -> None:
    """Then it has the same bits on each device and for any cut of shards, unlike torch's sqrt of CPU tensors."""
    generator = torch.Generator().manual_seed(1)
    weight, first = (torch.randn(1_100_001, generator=generator) for _ in range(2))
    second = torch.rand(1_100_001, generator=generator) * 1e-4
    numbers = lamb.numbers_of(
        {**zcomm.optim.Lamb([weight]).defaults, "weight_decay": 0.1, "eps_inside_sqrt": inside}, 1
    )
    eps, decay = np.float32(numbers.eps), np.float32(0.1)
    v = second.numpy()
    root = np.sqrt(v + eps) if inside else np.sqrt(v) + eps
    exact = first.numpy() / root + weight.numpy() * decay
    found = lamb.direction(weight, first, second, numbers)
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), exact)
    assert torch.equal(lamb.direction(weight[5:77], first[5:77], second[5:77], numbers), found[5:77])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_on_shards(job: None, options: dict[str, Any]) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(groups(model), "lamb", stage=2, bucket_mb=0.01, **options)
    for step in range(STEPS):
        opt.backward(loss_of(model, step, 0))
        opt.step()
        opt.zero_grad()
    assert_near({n: p.detach() for n, p in model.named_parameters()}, reference(options))
    opt.close()


PLACES: list[tuple[int, Any, float]] = [
    (0, None, 25.0),
    (1, "cpu", 0.01),
    (2, None, 0.004),
    (2, ("nvme", None, 0.6), 25.0),
    (3, None, 0.01),
    (3, "nvme", 25.0),
]


def train(place: tuple[int, Any, float], precision: str, folder: str) -> dict[str, torch.Tensor]:
    rank, (stage, offload, bucket_mb) = zcomm.init(timeout=60).rank, place
    model = network()
    opt = zcomm.ZeroOptimizer(
        model,
        zcomm.optim.Lamb(groups(model), lr=0.02),
        stage=stage,
        offload=zcomm.Offload(*offload) if isinstance(offload, tuple) else offload,
        nvme_path=folder,
        bucket_mb=bucket_mb,
        precision=precision,
        clip_norm=0.5,
    )
    for step in range(STEPS):
        opt.backward(loss_of(model, step, rank, opt.precision.dtype))
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    opt.close()
    return weights


def train_everywhere(folder: str, tile_count: int) -> tuple[dict[str, torch.Tensor], dict[Any, str]]:
    import zcomm.zero.layout.tiles as tiles

    tiles.TILE_COUNT = tile_count
    try:
        ends = {(p, place): train(place, p, folder) for p in ("fp32", "bf16", "fp16") for place in PLACES}
    finally:
        tiles.TILE_COUNT = 65536
    return ends["fp32", PLACES[0]], {key: digest(value) for key, value in ends.items()}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_same_bits_everywhere_and_the_numbers_of_the_formula(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    exact = reference({"lr": 0.02}, world_size, clip=0.5)
    for weights, digests in run_ranks(train_everywhere, world_size, str(tmp_path), 192):
        assert_near(weights, exact)
        for (precision, place), value in digests.items():
            assert value == digests[precision, PLACES[0]], f"{precision}: weights of {place}"


def two_stages(folder: str) -> list[dict[str, torch.Tensor]]:
    return [train(place, "fp32", folder) for place in ((0, None, 25.0), (3, "cpu", 0.01))]


def test_two_ranks(run_ranks: Run, tmp_path: Path) -> None:
    exact = reference({"lr": 0.02}, 2, clip=0.5)
    for whole, sharded in run_ranks(two_stages, 2, str(tmp_path)):
        assert_near(whole, exact)
        assert digest(whole) == digest(sharded)


# --- around the step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_unused_and_edited_parameters(job: None, stage: int) -> None:
    """A parameter without a gradient keeps its step count; an edit changes the ratio."""
    model, plain = network(), network().double()
    for each in (model, plain):
        each[0].bias.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, "lamb", stage=stage, lr=0.02, weight_decay=0.1)
    exact = Lamb64([{"params": [p for p in plain.parameters() if p.requires_grad]}], lr=0.02, weight_decay=0.1)
    for step in range(STEPS):
        for each in (model, plain):
            each[4].requires_grad_(step not in (1, 2))
        opt.backward(loss_of(model, step, 0))
        opt.step()
        opt.zero_grad()
        loss_of(plain, step, 0, torch.float64).backward()
        exact.step()
        plain.zero_grad()
        if step == 3:
            with zcomm.zero.GatheredParameters([model[2].weight], modifier_rank=0), torch.no_grad():
                model[2].weight.mul_(3.0)
            plain[2].weight.data.mul_(3.0)
    assert_near(opt.full_state_dict(), {name: value.detach() for name, value in plain.named_parameters()})
    opt.close()


def test_gradients_that_are_not_finite(job: None) -> None:
    for skip in (True, False):
        model = network()
        before = [p.detach().clone() for p in model.parameters()]
        opt = zcomm.ZeroOptimizer(model, "lamb", stage=2, skip_nonfinite=skip)
        opt.backward(loss_of(model, 0, 0))
        model[0].weight.grad[0, 0] = float("inf")
        opt.step()
        assert opt.skipped_steps == skip
        for number, (p, old) in enumerate(zip(model.parameters(), before, strict=True)):
            if skip:
                assert torch.equal(p, old)
            else:
                assert p.isnan().all() if number == 0 else p.isfinite().all(), "the ratio is of the whole parameter"
        opt.close()


def test_accumulated_and_scaled_gradients(job: None) -> None:
    ends = []
    for accum in (1, 2):
        model = network()
        opt = zcomm.ZeroOptimizer(model, "lamb", stage=2, lr=0.02, grad_accum=accum)
        for step in range(3):
            for _ in range(accum):
                opt.backward(loss_of(model, step, 0))
                opt.step()
                opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    assert digest(ends[0]) == digest(ends[1])


# --- checkpoints ------------------------------------------------------------------------------------------------


def resumed(folder: str) -> list[str]:
    """Train without a break, and with a save in stage 3 and a load in each other stage and tier."""
    rank, ends = zcomm.init(timeout=60).rank, []
    for place in (None, *PLACES):
        model, opt = make(*(place or PLACES[0]), folder)
        if place is None:
            other, first = make(3, None, 0.01, folder)
            advance(first, other, range(2), rank)
            first.save(f"{folder}/checkpoint")
            first.close()
            advance(opt, model, range(2), rank)
        else:
            opt.load(f"{folder}/checkpoint")
        advance(opt, model, range(2, STEPS), rank)
        ends.append(digest(opt.full_state_dict()))
        opt.close()
    return ends


def make(stage: int, offload: Any, bucket_mb: float, folder: str) -> tuple[nn.Module, zcomm.ZeroOptimizer]:
    model = network()
    tiers = zcomm.Offload(*offload) if isinstance(offload, tuple) else offload
    optimizer = zcomm.optim.Lamb(groups(model), lr=0.02)
    return model, zcomm.ZeroOptimizer(
        model, optimizer, stage=stage, offload=tiers, nvme_path=folder, bucket_mb=bucket_mb
    )


def advance(opt: zcomm.ZeroOptimizer, model: nn.Module, steps: range, rank: int) -> None:
    for step in steps:
        opt.backward(loss_of(model, step, rank))
        opt.step()
        opt.zero_grad()


def alone_from(folder: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint of two ranks on one."""
    model, opt = make(1, None, 25.0, folder)
    opt.load(f"{folder}/checkpoint")
    moments = {n: zcomm.zero.full_optim_state(p, "exp_avg") for n, p in model.named_parameters()}
    assert opt.state_dict()["state"][0]["step"] == 2
    opt.close()
    return moments


@pytest.mark.slow
def test_a_checkpoint_goes_to_every_place_and_world(run_ranks: Run, tmp_path: Path) -> None:
    for ends in run_ranks(resumed, 2, str(tmp_path)):
        assert len(set(ends)) == 1
    (moments,) = run_ranks(alone_from, 1, str(tmp_path))
    exact = network().double()
    opt = Lamb64(groups(exact), lr=0.02)
    for step in range(2):
        for rank in range(2):
            (loss_of(exact, step, rank, torch.float64) / 2).backward()
        opt.step()
        exact.zero_grad()
    assert_near(moments, {name: opt.state[p][1] for name, p in exact.named_parameters()})


def test_torchs_form_of_the_state(job: None) -> None:
    """The plain class continues from the state of shards, and shards continue from its state."""
    model, alone = network(), network()
    given = zcomm.optim.Lamb(groups(alone), lr=0.02)
    opt = zcomm.ZeroOptimizer(groups(model), "lamb", stage=1, lr=0.02)
    advance(opt, model, range(2), 0)
    alone.load_state_dict(model.state_dict())
    given.load_state_dict(opt.state_dict())
    for step in range(2, STEPS):
        loss_of(alone, step, 0).backward()
        given.step()
        given.zero_grad()
    advance(opt, model, range(2, 3), 0)
    opt.load_state_dict(given.state_dict())
    assert torch.equal(zcomm.zero.full_optim_state(model[0].weight, "exp_avg"), given.state[alone[0].weight]["exp_avg"])
    opt.close()


# --- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_groups", [True, False])
def test_the_configuration(job: None, in_groups: bool) -> None:
    model = network()
    params = {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-6, "max_coeff": 2.0, "min_coeff": 0.1, "bias_correction": True}
    settings = {
        "train_batch_size": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Lamb", "params": params},
        "zero_optimization": {"stage": 2},
    }
    given = [{"params": [p]} for p in model.parameters()] if in_groups else None
    engine = zcomm.initialize(model=model, model_parameters=given, config=settings)[0]
    plain = network().double()
    exact = Lamb64([{"params": list(plain.parameters())}], **params)
    for step in range(3):
        engine.backward(loss_of(engine, step, 0))
        engine.step()
        loss_of(plain, step, 0, torch.float64).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        exact.step()
        plain.zero_grad()
    assert_near(engine.module_state_dict(), {name: value.detach() for name, value in plain.named_parameters()})
    engine.destroy()


def test_deepspeeds_class(job: None) -> None:
    model = network()
    made = FusedLamb(groups(model), lr=0.02, eps_inside_sqrt=True)
    engine = zcomm.initialize(model=model, optimizer=made, config={"train_batch_size": 1})[0]
    assert engine.optimizer.rule.name == "lamb" and engine.optimizer.param_groups[1]["lr"] == 5e-3
    engine.optimizer.param_groups[0]["eps"] = 0.0
    engine.backward(loss_of(engine, 0, 0))
    with pytest.raises(ValueError, match=r"eps=0\.0 must be above 0"):
        engine.step()
    engine.destroy()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"eps": 0.0}, ValueError, r"eps=0\.0 must be above 0"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"max_coeff": 0.001}, ValueError, r"max_coeff=0\.001 must be at least min_coeff=0\.01"),
        ({"amsgrad": True}, ValueError, "no argument 'amsgrad'"),
        ({"max_grad_norm": 1.0}, ValueError, "no argument 'max_grad_norm'; did you mean 'clip_norm'"),
        ({"state_dtype": torch.bfloat16}, ValueError, "no argument 'state_dtype'"),
    ],
)
def test_what_is_refused(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        zcomm.ZeroOptimizer(network(), "lamb", **options)


def test_what_the_class_refuses() -> None:
    with pytest.raises(NotImplementedError, match=r"FusedLamb\(max_grad_norm=1\.0\)"):
        FusedLamb(network().parameters(), max_grad_norm=1.0)
    with pytest.raises(NotImplementedError, match=r"FusedLamb\(amsgrad=True\)"):
        FusedLamb(network().parameters(), amsgrad=True)
    with pytest.raises(NotImplementedError, match=r"max_grad_norm=2\.0 is not available"):
        FusedLamb([{"params": network().parameters(), "max_grad_norm": 2.0}])
    half = network().bfloat16()
    opt = zcomm.optim.Lamb(half.parameters())
    half(torch.ones(1, 24, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match=r"a parameter is torch.bfloat16; give Lamb to a ZeroOptimizer"):
        opt.step()


class FusedLAMB(torch.optim.SGD):
    """A class with the name of apex's class, which has another formula."""


def test_a_class_of_another_library_is_not_taken_for_it() -> None:
    net = network()
    with pytest.raises(ValueError, match=r"FusedLAMB' is not available: LAMB on shards is zcomm\.optim\.Lamb"):
        zcomm.ZeroOptimizer(net, FusedLAMB(net.parameters()))
