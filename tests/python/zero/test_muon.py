"""Muon: the bits of torch.optim.Muon in one process, and the same bits in every stage, tier and bucket size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long
from zcomm.optim import muon
from zero_jobs import digest

Run = Callable[..., list[Any]]
STEPS = 5
TorchMuon: Any = getattr(torch.optim, "Muon", None)
needs_torch = pytest.mark.skipif(TorchMuon is None, reason="torch.optim.Muon is of torch 2.9 and later")


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one."""
    yield
    zcomm.shutdown()


def network() -> nn.Sequential:
    """Build a model with matrices that are wide, tall and square, and with vectors."""
    torch.manual_seed(4)
    first, second, third, last = (nn.Linear(*sizes) for sizes in ((24, 50), (50, 50), (50, 70), (70, 5)))
    return nn.Sequential(first, nn.Tanh(), second, nn.LayerNorm(50), third, nn.Tanh(), last)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, except the last layer's, and the other parameters."""
    params = list(model.parameters())
    matrices = [p for p in params[:-2] if p.ndim == 2]
    return matrices, [p for p in params if all(p is not m for m in matrices)]


ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.05}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups of Muon, and one of AdamW between them."""
    matrices, others = split(model)
    return [
        {"params": matrices[:1], "weight_decay": 0.3, "use_muon": True},
        {"params": others, "use_muon": False, **ADAMW},
        {"params": matrices[1:], "lr": 0.03, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"},
    ]


def of_both_methods(model: nn.Module) -> list[dict[str, Any]]:
    """Return the same groups, with directions of two dtypes in flight."""
    first, second, third = groups(model)
    return [first, second, {**third, "ns_method": "gram"}]


def loss_of(model: Any, step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(6, 24, generator=generator), torch.randn(6, 5, generator=generator)
    return nn.functional.mse_loss(model(x.to(dtype)).to(torch.float32), y)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Exact:
    """Muon for the matrices of ``groups``, and CPUAdam, which has the fused kernel, for the others. The reference needs
    exact bits: gradients of few samples have few directions, and Muon enlarges roundings in the others."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        first, second, third = groups(model)
        self.adam = zcomm.optim.CPUAdam([p for p in second["params"] if p.requires_grad], **ADAMW)
        self.matrices = zcomm.optim.Muon([first, third], **{"lr": 0.02, **options})

    def step(self) -> None:
        for opt in (self.adam, self.matrices):
            opt.step()
            opt.zero_grad()


def assert_same(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    for name, value in exact.items():
        assert torch.equal(found[name], value), name


def reference(ranks: int = 1) -> dict[str, torch.Tensor]:
    """Train in one process by torch.optim.Muon and CPUAdam, which has the fused kernel."""
    model = network()
    first, second, third = groups(model)
    adam = zcomm.optim.CPUAdam(second["params"], **ADAMW)
    keys = ("params", "lr", "weight_decay", "nesterov", "adjust_lr_fn")
    matrices = TorchMuon([{k: g[k] for k in keys if k in g} for g in (first, third)], lr=0.02)
    for step in range(STEPS):
        for rank in range(ranks):
            (loss_of(model, step, rank) / ranks).backward()
        for opt in (adam, matrices):
            opt.step()
            opt.zero_grad()
    return weights_of(model)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.4, "momentum": 0.5},
    {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "original"},
    {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
    {"lr": 0.02, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 0.5},
]


@needs_torch
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_process_has_the_bits_of_torch(job: None, options: dict[str, Any]) -> None:
    """Compare the plain class, the name, torch's class and an instance of it."""
    plain = network()
    matrices, others = split(plain)
    exact = TorchMuon(matrices, **options)
    ends = []
    for kind in ("alone", "name", "class", "instance"):
        model = network()
        given, rest = split(model)
        for param in rest:
            param.requires_grad_(False)
        opt: Any
        if kind == "alone":
            opt = zcomm.optim.Muon(given, **options)
        elif kind == "instance":
            opt = zcomm.ZeroOptimizer(model, TorchMuon(given, **options), stage=3, bucket_mb=0.01)
        else:
            which = "muon" if kind == "name" else TorchMuon
            opt = zcomm.ZeroOptimizer(given, which, stage=2, bucket_mb=0.01, **options)
        for step in range(STEPS):
            loss_of(model, step, 0).backward()
            opt.step()
            opt.zero_grad()
        ends.append(weights_of(model))
        if kind != "alone":
            opt.close()
    for param in others:
        param.requires_grad_(False)
    for step in range(STEPS):
        loss_of(plain, step, 0).backward()
        exact.step()
        exact.zero_grad()
    for end in ends:
        assert_same(end, weights_of(plain))
    assert not torch.equal(ends[0]["0.weight"], network()[0].weight)


@needs_torch
def test_the_class_alone_has_the_bits_of_two_of_torchs() -> None:
    model, plain = network(), network()
    opt = alone(model)
    first, second, third = groups(plain)
    exact = TorchMuon([{k: v for k, v in g.items() if k != "use_muon"} for g in (first, third)], lr=0.02)
    adam = torch.optim.AdamW(second["params"], **ADAMW)
    for step in range(STEPS):
        loss_of(model, step, 0).backward()
        loss_of(plain, step, 0).backward()
        for each in (opt, exact, adam):
            each.step()
            each.zero_grad()
    assert_same(weights_of(model), weights_of(plain))


def orthogonal64(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Apply the iterations' polynomial to the singular values, in float64."""
    a, b, c = muon.COEFFICIENTS
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(7, 40), (40, 7), (16, 16), (1, 9)])
def test_both_methods_are_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for steps in (0, 1, 2, 3, 5):
        exact = orthogonal64(matrix, steps)
        for method, tolerance in (("gram", 1e-5), ("standard", 0.06)):
            options = {**zcomm.optim.Muon([torch.zeros(1, 1)], ns_method=method, ns_steps=steps).defaults}
            numbers = muon.numbers_of(options)
            found = muon.orthogonal(matrix.to(muon.dtype_of(numbers)), numbers).double()
            assert float((found - exact).norm() / exact.norm()) < tolerance, (method, steps)


# --- the same bits everywhere -----------------------------------------------------------------------------------

PLACES: list[tuple[int, Any, float]] = [
    (0, None, 25.0),
    (0, "nvme", 0.004),
    (1, "cpu", 0.01),
    (2, None, 0.004),
    (2, ("nvme", None, 0.6), 25.0),
    (3, None, 0.01),
    (3, "nvme", 25.0),
    (3, "nvme", 0.004),
]


def make(
    place: tuple[int, Any, float], folder: str, precision: str = "fp32", **options: Any
) -> tuple[nn.Module, zcomm.ZeroOptimizer]:
    stage, offload, bucket_mb = place
    model = network()
    return model, zcomm.ZeroOptimizer(
        model,
        zcomm.optim.Muon(of_both_methods(model) if precision == "bf16" else groups(model), lr=0.02),
        stage=stage,
        offload=zcomm.Offload(*offload) if isinstance(offload, tuple) else offload,
        nvme_path=folder,
        bucket_mb=bucket_mb,
        precision=precision,
        **options,
    )


def advance(opt: zcomm.ZeroOptimizer, model: nn.Module, steps: range, rank: int) -> None:
    for step in steps:
        opt.backward(loss_of(model, step, rank, opt.precision.dtype))
        opt.step()
        opt.zero_grad()


def train(place: tuple[int, Any, float], precision: str, folder: str, **options: Any) -> dict[str, torch.Tensor]:
    rank = zcomm.init(timeout=60).rank
    model, opt = make(place, folder, precision, **options)
    advance(opt, model, range(STEPS), rank)
    weights = opt.full_state_dict()
    if precision == "fp16":
        assert opt.skipped_steps < STEPS
    opt.close()
    return weights


def train_everywhere(folder: str, tile_count: int) -> dict[Any, str]:
    import zcomm.zero.layout.tiles as tiles
    import zcomm.zero.optim_state.nvme as nvme

    tiles.TILE_COUNT = tile_count
    usual = nvme.SPAN_TILES, nvme.WINDOWS
    nvme.SPAN_TILES, nvme.WINDOWS = 2, 4  # more spans than windows
    options: dict[str, Any] = {"clip_norm": 0.5}
    try:
        return {
            (p, place): digest(train(place, p, folder, **options, **({"loss_scale": 256.0} if p == "fp16" else {})))
            for p in ("fp32", "bf16", "fp16")
            for place in PLACES
        }
    finally:
        tiles.TILE_COUNT = 65536
        nvme.SPAN_TILES, nvme.WINDOWS = usual


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [long(1), 2, long(3)])
def test_same_bits_everywhere(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for digests in run_ranks(train_everywhere, world_size, str(tmp_path), 192):
        for (precision, place), value in digests.items():
            assert value == digests[precision, PLACES[0]], f"{precision}: weights of {place}"
        assert len(set(digests.values())) == 3


def two_places(folder: str) -> list[dict[str, torch.Tensor]]:
    import zcomm.zero.layout.tiles as tiles

    tiles.TILE_COUNT = 192
    try:
        return [train(place, "fp32", folder) for place in (PLACES[0], PLACES[4], PLACES[7])]
    finally:
        tiles.TILE_COUNT = 65536


@needs_torch
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_bits_of_one_process_with_torchs_class(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    exact = reference(world_size)
    for ends in run_ranks(two_places, world_size, str(tmp_path)):
        for end in ends:
            assert_same(end, exact)


def noted(whole: Any, shapes: list[Any], matrix: torch.Tensor, hyper: Any) -> torch.Tensor:
    shapes.append(tuple(matrix.shape))
    return whole(matrix, hyper)


def counted(folder: str) -> list[tuple[int, int]]:
    """Count the matrices that this rank orthogonalizes in two steps."""
    rank, ends = zcomm.init(timeout=60).rank, []
    for place in ((0, None, 25.0), (2, None, 25.0), (3, None, 0.004)):
        model, opt = make(place, folder)
        shapes: list[tuple[int, ...]] = []
        opt.rule.whole_update = partial(noted, opt.rule.whole_update, shapes)
        advance(opt, model, range(2), rank)
        ends.append((len(shapes), len(set(shapes))))
        opt.close()
    return ends


def test_ranks_make_different_matrices_orthogonal(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(counted, 2, str(tmp_path))
    assert first == [(4, 2)] * 3, "matrices 0 and 2 of 3, in two steps"
    assert second == [(2, 1)] * 3


def batch_sizes(bucket_mb: float) -> list[int]:
    """Return the number of matrices in each batch of a model of ten."""
    zcomm.init(timeout=60)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(10)))
    opt = zcomm.ZeroOptimizer(model, "muon", stage=2, bucket_mb=bucket_mb)
    matrices, buckets = opt._micro_steps._step._scheduler._matrices, opt._parts.geometry.buckets
    sizes = [sum(len(bucket.params) for bucket in batch) for batch in matrices.batches(buckets)]
    opt.close()
    return sizes


def test_a_batch_has_a_matrix_for_each_rank(run_ranks: Run) -> None:
    """Memory holds a few matrices, however many a model has."""
    assert run_ranks(batch_sizes, 3, 0.004) == [[3, 3, 3, 1]] * 3
    assert run_ranks(batch_sizes, 1, 0.004) == [[1] * 10]


def configured_places(folder: str) -> list[str]:
    rank, ends = zcomm.init(timeout=60).rank, []
    for stage, device in ((0, "none"), (1, "cpu"), (3, "nvme")):
        place = {"device": device, "nvme_path": folder} if device == "nvme" else {"device": device}
        engine = configured(network(), {"lr": 0.02}, None, stage, offload_optimizer=place)
        for step in range(3):
            engine.backward(loss_of(engine, step, rank))
            engine.step()
        ends.append(digest(engine.module_state_dict()))
        engine.destroy()
    return ends


def test_the_configuration_on_two_ranks(run_ranks: Run, tmp_path: Path) -> None:
    ends = run_ranks(configured_places, 2, str(tmp_path))
    assert len({each for of_rank in ends for each in of_rank}) == 1


# --- around the step --------------------------------------------------------------------------------------------


def alone(model: nn.Module, **options: Any) -> zcomm.optim.Muon:
    return zcomm.optim.Muon(groups(model), **{"lr": 0.02, **options})


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_unused_and_edited_parameters(job: None, stage: int) -> None:
    """A parameter without a gradient keeps weight and momentum; an edit of a weight takes effect."""
    model, plain = network(), network()
    for each in (model, plain):
        each[2].weight.requires_grad_(False)
    opt = zcomm.ZeroOptimizer(model, alone(model), stage=stage, bucket_mb=0.004)
    exact = Exact(plain)
    for step in range(STEPS):
        for each in (model, plain):
            each[4].requires_grad_(step not in (1, 2))
        opt.backward(loss_of(model, step, 0))
        opt.step()
        opt.zero_grad()
        loss_of(plain, step, 0).backward()
        exact.step()
        if step == 3:
            with zcomm.zero.GatheredParameters([model[0].weight], modifier_rank=0), torch.no_grad():
                model[0].weight.mul_(3.0)
            plain[0].weight.data.mul_(3.0)
    assert_same(opt.full_state_dict(), weights_of(plain))
    momentum = zcomm.zero.full_optim_state(model[4].weight, "momentum_buffer")
    assert torch.equal(momentum, exact.matrices.state[plain[4].weight]["momentum_buffer"])
    assert int(zcomm.zero.full_optim_state(model[4].weight, "step")) == STEPS - 2
    opt.close()


def test_gradients_that_are_not_finite(job: None) -> None:
    for skip in (True, False):
        model = network()
        before = weights_of(model)
        opt = zcomm.ZeroOptimizer(model, alone(model), stage=2, skip_nonfinite=skip)
        opt.backward(loss_of(model, 0, 0))
        model[2].weight.grad[0, 0] = float("inf")
        opt.step()
        assert opt.skipped_steps == skip
        for name, value in weights_of(model).items():
            if skip:
                assert torch.equal(value, before[name])
            else:
                assert value.isnan().all() if name == "2.weight" else value.isfinite().all(), name
        opt.close()


def test_accumulated_gradients(job: None) -> None:
    ends = []
    for accum in (1, 2):
        model = network()
        opt = zcomm.ZeroOptimizer(model, alone(model), stage=2, grad_accum=accum)
        for step in range(3):
            for _ in range(accum):
                opt.backward(loss_of(model, step, 0))
                opt.step()
                opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
    assert digest(ends[0]) == digest(ends[1])


def test_gradients_are_as_they_were_after_a_step(job: None) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, alone(model), stage=2, bucket_mb=0.004)
    opt.backward(loss_of(model, 0, 0))
    before = [p.grad.clone() for p in model.parameters()]
    opt.step()
    assert all(torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True))
    opt.close()


def failing(call: str, folder: str) -> tuple[str, str]:
    rank = zcomm.init(timeout=60).rank
    model, opt = make((2, None, 0.004), folder)
    advance(opt, model, range(1), rank)

    def fail(*args: Any) -> Any:
        raise OSError(5, "the drive is gone")

    opt.save(f"{folder}/checkpoint")
    if rank == 1:
        setattr(opt.rule, call, fail)
    messages = []
    for what in (lambda: advance(opt, model, range(1, 2), rank), lambda: opt.state_dict()):
        with pytest.raises((OSError, RuntimeError)) as caught:
            what()
        messages.append(str(caught.value))
    vars(opt.rule).pop(call, None)
    opt.load(f"{folder}/checkpoint")
    advance(opt, model, range(1, STEPS), rank)
    ends = digest(opt.full_state_dict())
    opt.close()
    model, opt = make((0, None, 25.0), folder)
    advance(opt, model, range(STEPS), rank)
    assert digest(opt.full_state_dict()) == ends
    opt.close()
    return messages[0], messages[1]


@pytest.mark.parametrize("call", ["part_of", "whole_update", "step"])
def test_an_error_of_one_rank_ends_the_step_of_all_and_a_load_mends_it(
    run_ranks: Run, tmp_path: Path, call: str
) -> None:
    (first, poison), (second, _) = run_ranks(failing, 2, call, str(tmp_path))
    assert "the drive is gone" in second
    assert "step() failed on rank 1: OSError: [Errno 5] the drive is gone" in first
    assert "half way" in poison


# --- checkpoints ------------------------------------------------------------------------------------------------


def resumed(folder: str) -> list[str]:
    """Train without a break, and with a save in stage 3 and a load in each other stage and tier."""
    rank, ends = zcomm.init(timeout=60).rank, []
    for place in (None, *PLACES):
        model, opt = make(place or PLACES[0], folder)
        if place is None:
            other, first = make((3, None, 0.01), folder)
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


def alone_from(folder: str) -> dict[str, torch.Tensor]:
    """Load a checkpoint of two ranks on one."""
    model, opt = make((1, None, 25.0), folder)
    opt.load(f"{folder}/checkpoint")
    momenta = {
        n: zcomm.zero.full_optim_state(p, "momentum_buffer")
        for n, p in model.named_parameters()
        if n in ("0.weight", "2.weight", "4.weight")
    }
    opt.close()
    return momenta


@pytest.mark.slow
def test_a_checkpoint_goes_to_every_place_and_world(run_ranks: Run, tmp_path: Path) -> None:
    for ends in run_ranks(resumed, 2, str(tmp_path)):
        assert len(set(ends)) == 1
    (momenta,) = run_ranks(alone_from, 1, str(tmp_path))
    model = network()
    opt = Exact(model)
    for step in range(2):
        for rank in range(2):
            (loss_of(model, step, rank) / 2).backward()
        opt.step()
    exact = {name: opt.matrices.state[model.get_parameter(name)]["momentum_buffer"] for name in momenta}
    assert_same(momenta, exact)


@needs_torch
def test_torchs_form_of_the_state(job: None) -> None:
    """torch's class continues from the state of shards, and shards continue from its state."""
    model, plain = network(), network()
    for each in (model, plain):
        for param in split(each)[1]:
            param.requires_grad_(False)
    exact = TorchMuon(split(plain)[0], lr=0.02)
    opt = zcomm.ZeroOptimizer(split(model)[0], "muon", stage=1, lr=0.02)
    advance(opt, model, range(2), 0)
    plain.load_state_dict(model.state_dict())
    exact.load_state_dict(opt.state_dict())
    for step in range(2, STEPS):
        loss_of(plain, step, 0).backward()
        exact.step()
        exact.zero_grad()
    advance(opt, model, range(2, STEPS), 0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    opt.load_state_dict(exact.state_dict())
    found = zcomm.zero.full_optim_state(model[0].weight, "momentum_buffer")
    assert torch.equal(found, exact.state[plain[0].weight]["momentum_buffer"])
    opt.close()


def test_the_state_beside_adamw(job: None) -> None:
    """Each kind of group has torch's names of its arrays, which move to the plain class and back."""
    model, plain = network(), network()
    opt = zcomm.ZeroOptimizer(model, alone(model), stage=2)
    advance(opt, model, range(2), 0)
    state = opt.state_dict()
    assert set(state["state"][0]) == {"step", "momentum_buffer"}
    assert set(state["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    exact = alone(plain)
    plain.load_state_dict(model.state_dict())
    exact.load_state_dict(copy.deepcopy(state))
    loss_of(plain, 2, 0).backward()
    exact.step()
    other = network()
    other.load_state_dict(model.state_dict())
    again = zcomm.ZeroOptimizer(other, alone(other), stage=3, bucket_mb=0.004)
    again.load_state_dict(state)
    advance(again, other, range(2, 3), 0)
    for name, value in again.full_state_dict().items():  # torch's AdamW rounds differently in the same step
        same = torch.equal if name in ("0.weight", "2.weight", "4.weight") else torch.allclose
        assert same(value, plain.get_parameter(name)), name
    with pytest.raises(ValueError, match=r"0.weight has no optimizer state 'exp_avg'; it has momentum_buffer, step"):
        zcomm.zero.full_optim_state(other[0].weight, "exp_avg")
    state["param_groups"][0]["use_muon"] = False
    with pytest.raises(ValueError, match="use_muon=False: it was True at construction, and stays so"):
        again.load_state_dict(state)
    opt.close()
    again.close()


# --- arguments --------------------------------------------------------------------------------------------------


def configured(model: nn.Module, params: dict[str, Any], given: Any = None, stage: int = 2, **tiers: Any) -> Any:
    settings = {
        "train_batch_size": zcomm.init().world_size,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": params},
        "zero_optimization": {"stage": stage, **tiers},
    }
    return zcomm.initialize(model=model, model_parameters=given, config=settings)[0]


@pytest.mark.parametrize("in_groups", [True, False])
def test_the_configuration(job: None, in_groups: bool) -> None:
    """DeepSpeed's groups, defaults and rates; its attribute use_muon overrides the default of a parameter."""
    model, plain = network(), network()
    model[6].weight.use_muon = False
    params = {"lr": 0.01, "muon_lr": 0.03, "weight_decay": 0.1, "momentum": 0.9, "ns_method": "standard", "eps": 1e-8}
    given = [{"params": [p]} for p in model.parameters()] if in_groups else None
    engine = configured(model, params, given)
    first, second = engine.optimizer.param_groups
    assert (first["name"], first["use_muon"], first["lr"], len(first["params"])) == ("muon-params", True, 0.03, 3)
    assert (second["name"], second["lr"], second["betas"]) == ("adam-params", 0.01, (0.9, 0.95))
    matrices, others = split(plain)
    exact = zcomm.optim.Muon(matrices, lr=0.03, weight_decay=0.1, momentum=0.9)
    adam = zcomm.optim.CPUAdam(others, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        engine.backward(loss_of(engine, step, 0))
        engine.step()
        loss_of(plain, step, 0).backward()
        for opt in (exact, adam):
            opt.step()
            opt.zero_grad()
    assert_same(engine.module_state_dict(), weights_of(plain))
    engine.destroy()


def test_defaults_of_the_configuration(job: None) -> None:
    engine = configured(nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 3)), {})
    first, second = engine.optimizer.param_groups
    assert [tuple(p.shape) for p in first["params"]] == [(4, 6), (3, 6)], 'no "embed" in the name 0.weight'
    numbers = ("lr", "momentum", "weight_decay", "ns_method")
    assert [first[key] for key in numbers] == [0.02, 0.95, 0.0, "gram"]
    assert [second[key] for key in ("lr", "betas", "eps", "weight_decay")] == [3e-4, (0.9, 0.95), 1e-10, 0.0]
    engine.destroy()
    named = nn.Module()
    named.embedding, named.lm_head, named.inner = nn.Embedding(4, 6), nn.Linear(6, 4), nn.Linear(6, 6)
    engine = configured(named, {}, stage=1)
    assert [p is named.inner.weight for p in engine.optimizer.param_groups[0]["params"]] == [True]
    engine.destroy()
    for use_muon in (True, False):
        model = nn.Linear(3, 2)
        for param in model.parameters():
            param.use_muon = use_muon and param.ndim == 2
            param.requires_grad_(param.use_muon or not use_muon)
        engine = configured(model, {})
        assert [group["use_muon"] for group in engine.optimizer.param_groups] == [use_muon]
        engine.destroy()


def test_what_the_configuration_refuses(job: None) -> None:
    with pytest.raises(ValueError, match=r'"Muon": parameter 0.weight of shape \(3, 2, 5, 5\): .*use_muon = False'):
        configured(nn.Sequential(nn.Conv2d(2, 3, 5)), {})
    with pytest.raises(ValueError, match=r'"optimizer.params.ns_method" must be one of gram, standard, got "fast"'):
        configured(network(), {"ns_method": "fast"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0 must be a number of at least 0"),
        ({"momentum": -0.5}, r"momentum=-0\.5"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"ns_steps": 100}, "ns_steps=100 must be a whole number from 0 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\) must be three numbers"),
        ({"adjust_lr_fn": "other"}, "adjust_lr_fn='other' must be one of None, 'original', 'match_rms_adamw'"),
        ({"ns_method": "fast"}, "ns_method='fast' must be one of 'standard', 'gram'"),
        ({"betas": (0.9, 0.9)}, "no argument 'betas'"),
        ({}, r"parameter 0\.bias of shape \(50,\): Muon updates only matrices.*\"use_muon\": False"),
    ],
)
def test_what_is_refused(job: None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zcomm.ZeroOptimizer(network(), "muon", **options)


def test_groups_that_are_refused(job: None) -> None:
    model = network()
    for change, message in (
        ({"use_muon": "yes"}, "use_muon='yes' must be True"),
        ({"use_muon": False, "state_dtype": torch.bfloat16}, "AdamW has only fp32 state with Muon"),
        ({"use_muon": False, "betas": (0.9, 1.0)}, "betas"),
        ({"use_muon": False, "amsgrad": True}, "amsgrad"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            zcomm.ZeroOptimizer([{"params": list(model.parameters()), **change}], "muon")
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 of shape \(50,\): Muon"):
        zcomm.optim.Muon(model.parameters())


def test_an_attribute_that_contradicts_its_group(job: None) -> None:
    model = nn.Linear(4, 3, bias=False)
    for kind in (True, False):
        model.weight.use_muon = not kind
        with pytest.raises(ValueError, match=f"weight has use_muon={not kind}, and is in param group 0, which"):
            zcomm.ZeroOptimizer(model, zcomm.optim.Muon([{"params": [model.weight], "use_muon": kind}]))


def test_options_that_change_between_steps(job: None) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, alone(model), stage=2)
    before = weights_of(model)
    for key, value, message in (
        ("use_muon", False, "use_muon=False: it was True"),
        ("ns_steps", 2.5, r"ns_steps=2\.5"),
    ):
        kept, opt.param_groups[0][key] = opt.param_groups[0][key], value
        opt.backward(loss_of(model, 0, 0))
        with pytest.raises(ValueError, match=message):
            opt.step()
        opt.zero_grad()
        opt.param_groups[0][key] = kept
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    opt.param_groups[0]["lr"] = torch.tensor(0.0)
    advance(opt, model, range(1), 0)
    assert torch.equal(model[0].weight, before["0.weight"]) and not torch.equal(model[2].weight, before["2.weight"])
    opt.close()


class MuonWithAuxAdam(torch.optim.SGD):
    """A class with the name of another library's class."""


def test_a_class_of_another_library_is_not_taken_for_it() -> None:
    net = network()
    with pytest.raises(ValueError, match=r"MuonWithAuxAdam' is not available: Muon on shards is torch\.optim\.Muon"):
        zcomm.ZeroOptimizer(net, MuonWithAuxAdam(net.parameters()))


def test_the_class_refuses_other_dtypes() -> None:
    half = nn.Linear(4, 3, bias=False).bfloat16()
    opt = zcomm.optim.Muon(half.parameters())
    half(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match=r"a parameter is torch.bfloat16; give Muon to a ZeroOptimizer"):
        opt.step()
