"""ZeroOptimizer with every optimizer: the same bits in every stage and tier, torch.optim's numbers, clear errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long, slow
from zcomm import _core
from zero_jobs import digest

Run = Callable[..., list[Any]]
STEPS = 6

# name, options, distance explained by rounding: a sign turns a gradient's last bit into a whole step
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], float]] = {
    "adam": ("adam", {"lr": 1e-2, "weight_decay": 0.1}, 1e-4),
    "adamw": ("adamw", {"lr": 1e-2, "betas": (0.8, 0.95)}, 1e-4),
    "bf16 state": ("adam", {"lr": 1e-2, "state_dtype": torch.bfloat16}, 0.1),
    "8-bit state": ("adam", {"lr": 1e-2, "state_dtype": "8bit"}, 0.3),
    "lion": ("lion", {"lr": 1e-3, "weight_decay": 0.1}, 1e-2),
    "sgd": ("sgd", {"lr": 0.1, "weight_decay": 0.01}, 1e-5),
    "momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, 1e-5),
    "nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, 1e-5),
    "adagrad": ("adagrad", {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}, 1e-5),
    "rmsprop": ("rmsprop", {"lr": 1e-3, "momentum": 0.9, "centered": True}, 1e-2),
    "nadam": ("nadam", {"lr": 1e-2}, 1e-4),
    "asgd": ("asgd", {"lr": 0.05}, 1e-5),
    "rprop": ("rprop", {"lr": 1e-3}, 2e-2),
}


class Lion64(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675, which torch lacks."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = (0.9 * m + 0.1 * p.grad).sign() + group["weight_decay"] * p
                p -= group["lr"] * update
                m.mul_(0.99).add_(p.grad, alpha=0.01)


TORCH: dict[str, Any] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "lion": Lion64,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


def network() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(24, 50), nn.Tanh(), nn.Linear(50, 70), nn.Tanh(), nn.Linear(70, 5))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return param groups: biases learn half as fast."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim == 1], "lr": 5e-3}]


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 24, generator=generator), torch.randn(6, 5, generator=generator)


def small_tiles(kind: str) -> None:
    """Make spans small enough for the ring of windows to wrap; 8-bit state has blocks of 256."""
    import zcomm.zero.layout.tiles
    import zcomm.zero.optim_state.nvme

    zcomm.zero.layout.tiles.TILE_COUNT = 256 if kind == "8-bit state" else 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4


PLACES: list[tuple[int, Any, float]] = [
    (0, None, 25.0),
    (1, ("cpu", None, 0.5), 0.01),
    (2, ("nvme", None, 0.6), 25.0),
    (2, "nvme", 0.01),
    (3, "nvme", 25.0),
]


def train(kind: str, precision: str, place: tuple[int, Any, float], folder: str) -> dict[str, torch.Tensor]:
    comm = zcomm.init(timeout=60)
    name, options, _ = OPTIMIZERS[kind]
    model = network()
    stage, offload, bucket_mb = place
    optimizer: Any = name
    wanted: Any = model
    if "state_dtype" in options:
        optimizer, options = zcomm.optim.CPUAdam(groups(model), adamw=False, **options), {}
    elif TORCH[name] is not Lion64:
        optimizer, options = TORCH[name](groups(model), **options), {}
    offload = zcomm.Offload(*offload) if isinstance(offload, tuple) else offload
    opt = zcomm.ZeroOptimizer(
        wanted,
        optimizer,
        stage=stage,
        offload=offload,
        bucket_mb=bucket_mb,
        nvme_path=folder,
        precision=precision,
        clip_norm=0.5,
        **options,
    )
    for step in range(STEPS):
        x, y = data(step, comm.rank)
        opt.backward(nn.functional.mse_loss(model(x.to(opt.precision.dtype)).float(), y))
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    opt.close()
    return weights


def reference(kind: str, world_size: int) -> dict[str, torch.Tensor]:
    """Train by torch's class in float64 on the whole batch."""
    name, options, _ = OPTIMIZERS[kind]
    options = {key: value for key, value in options.items() if key != "state_dtype"}
    model = network().double()
    params = model.parameters() if name == "lion" else groups(model)
    opt = Lion64(params, options) if name == "lion" else TORCH[name](params, **options)
    for step in range(STEPS):
        for rank in range(world_size):
            x, y = data(step, rank)
            (nn.functional.mse_loss(model(x.double()), y.double()) / world_size).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def run_all(kinds: list[str], folder: str) -> list[tuple[str, float, dict[Any, str]]]:
    """Return per optimizer: distance from torch's in float64; per stage and tier: a hash of the weights' bits."""
    results = []
    for kind in kinds:
        small_tiles(kind)
        weights = train(kind, "fp32", PLACES[0], folder)
        exact = reference(kind, zcomm.world_size())
        distance = max(float((weights[n].double() - exact[n]).norm() / exact[n].norm()) for n in exact)
        hashes = {}
        for precision in ("fp32", "bf16", "fp16"):
            for place in PLACES:
                hashes[precision, place] = digest(train(kind, precision, place, folder))
        results.append((kind, distance, hashes))
    return results


@pytest.mark.timeout_s(280)
@pytest.mark.parametrize("world_size", [slow(2), long(3)])
def test_same_bits_everywhere_and_the_numbers_of_torch(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    kinds = list(OPTIMIZERS) if world_size == 2 else ["lion", "nesterov", "adagrad", "nadam"]
    for results in run_ranks(run_all, world_size, kinds, str(tmp_path), timeout_s=240):
        for kind, distance, hashes in results:
            assert distance < OPTIMIZERS[kind][2], f"{kind}: {distance} from torch.optim in float64"
            for (precision, place), value in hashes.items():
                assert value == hashes[precision, PLACES[0]], f"{kind}, {precision}: weights of {place}"
        assert len({hashes["fp32", PLACES[0]] for _, _, hashes in results}) == len(results)


# --- memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "arrays"),
    [
        ("adamw", 2),
        ("bf16 state", 2),
        ("8-bit state", 2),
        ("lion", 1),
        ("sgd", 0),
        ("momentum", 1),
        ("adagrad", 1),
        ("rmsprop", 3),
    ],
)
def test_memory_follows_the_optimizers_arrays(tmp_path: Path, kind: str, arrays: int) -> None:
    name, options, _ = OPTIMIZERS[kind]
    for precision, low in (("fp32", 0), ("bf16", 2), ("fp16", 4)):
        model = network()
        opt = zcomm.ZeroOptimizer(
            model, name, stage=2, offload="nvme", nvme_path=str(tmp_path), precision=precision, **options
        )
        numel = opt._live.geometry.count
        size = {"bf16 state": 2, "8-bit state": 1}.get(kind, 4)
        formula = zcomm.zero.memory_formula(numel, 1, 2, precision, "nvme", state_arrays=arrays, array_nbytes=size)
        scales = 2 * 4 * numel // 256 if size == 1 else 0
        assert formula["nvme"]["optimizer"] == numel * (size * arrays + low) + scales
        assert opt.memory()["nvme"]["optimizer"] == formula["nvme"]["optimizer"]
        opt.backward(model(torch.ones(1, 24, dtype=opt.precision.dtype)).float().sum())
        opt.step()
        opt.close()
    zcomm.shutdown()


# --- which optimizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["class", "instance", "name"])
def test_a_class_an_instance_or_a_name(given: str) -> None:
    model = network()
    options = {"lr": 0.25, "momentum": 0.5}
    optimizer: Any = {"class": torch.optim.SGD, "instance": torch.optim.SGD(model.parameters(), **options)}.get(
        given, "sgd"
    )
    opt = zcomm.ZeroOptimizer(model, optimizer, stage=1, **({} if given == "instance" else options))
    assert opt.param_groups[0]["lr"] == 0.25 and opt.param_groups[0]["momentum"] == 0.5
    assert opt.defaults["dampening"] == 0
    opt.close()
    zcomm.shutdown()


def test_fused_classes_are_taken_as_they_are() -> None:
    model = network()
    given = zcomm.optim.CPUAdam(model.parameters(), lr=0.5, adamw=False, weight_decay=0.25)
    opt = zcomm.ZeroOptimizer(model, given, stage=1)
    group = opt.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["decoupled_weight_decay"]) == (0.5, 0.25, False)
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize(
    ("optimizer", "arguments", "kind", "message"),
    [
        (torch.optim.LBFGS, {}, ValueError, "torch.optim.lbfgs.LBFGS.* is not available: it searches along lines"),
        ("adam", {"state_dtype": torch.float16}, ValueError, "state_dtype=torch.float16"),
        ("shampoo", {}, ValueError, "unknown optimizer 'shampoo'"),
        ("sgd", {"betas": (0.9, 0.9)}, ValueError, "no argument 'betas'; Arguments of sgd: lr"),
        ("rmsprop", {"betas": (0.9, 0.9)}, ValueError, "no argument 'betas'; Arguments of rmsprop"),
        ("lion", {"betas": (0.9, 1.0)}, ValueError, "betas"),
        ("sgd", {"nesterov": True}, ValueError, "nesterov=True needs momentum"),
        ("adam", {"amsgrad": True}, NotImplementedError, "amsgrad"),
        ("lion", {"state_dtype": torch.bfloat16}, ValueError, "no argument 'state_dtype'; Arguments of lion"),
    ],
)
def test_what_is_not_available_is_said(
    optimizer: Any, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        zcomm.ZeroOptimizer(network(), optimizer, **arguments)


@pytest.mark.parametrize("kind", [torch.bfloat16, "8bit"])
def test_narrow_state_has_the_bits_of_the_optimizer_alone(kind: Any) -> None:
    """Stochastic rounding depends on the step and the element's index in the param groups, as in CPUAdam."""
    plain, sharded = network(), network()
    alone = zcomm.optim.CPUAdam(groups(plain), lr=0.1, state_dtype=kind)
    opt = zcomm.ZeroOptimizer(
        sharded, zcomm.optim.CPUAdam(groups(sharded), lr=0.1, state_dtype=kind), stage=2, bucket_mb=0.005
    )
    for step in range(4):
        x, y = data(step, 0)
        for model, optimizer in ((plain, alone), (sharded, opt)):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(alone.wide_state(a)[0], zcomm.zero.full_optim_state(b, "exp_avg"))
    again = zcomm.optim.CPUAdam(groups(network()), lr=0.1, state_dtype=kind)
    again.load_state_dict(opt.state_dict())
    for a, b in zip(alone.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(a[key].float(), b[key].float()) for key in ("exp_avg", "exp_avg_sq")), "into the class"
    opt.close()
    zcomm.shutdown()


def test_groups_of_an_instance_are_checked() -> None:
    model = network()
    given = torch.optim.Adam([{"params": model.parameters(), "amsgrad": True}])
    with pytest.raises(NotImplementedError, match="amsgrad"):
        zcomm.ZeroOptimizer(model, given)


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    model = network()
    given = torch.optim.Adagrad(model.parameters())  # has state after construction
    zcomm.ZeroOptimizer(model, given, stage=1).close()
    model(torch.ones(1, 24)).sum().backward()
    given.step()
    with pytest.raises(ValueError, match="has taken steps"):
        zcomm.ZeroOptimizer(model, given)
    zcomm.shutdown()


KINDS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, 0.01, momentum=0.5, centered=True),
    "two groups": lambda params: torch.optim.RMSprop(
        [{"params": params[:2], "momentum": 0.5}, {"params": params[2:]}], 0.01
    ),
    "adadelta": lambda params: torch.optim.Adadelta(params, 0.5),
    "adamax": lambda params: torch.optim.Adamax(params, 0.01),
    "nadam": lambda params: torch.optim.NAdam(params, 0.01),
    "radam": lambda params: torch.optim.RAdam(params, 0.01),
    "asgd": lambda params: torch.optim.ASGD(params, 0.01, t0=2, lambd=0.1),
    "rprop": lambda params: torch.optim.Rprop(params, 0.01),
}


@pytest.mark.parametrize("kind", KINDS)
def test_state_comes_from_torch_and_goes_back(kind: str) -> None:
    """With all of torch's step counts, also for a layer that has taken fewer steps than others of its group."""

    def made(weights: dict[str, torch.Tensor]) -> tuple[nn.Sequential, Any]:
        net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        net.load_state_dict(weights)
        return net, KINDS[kind](list(net.parameters()))

    def train(net: nn.Sequential, opt: Any, begin: int) -> None:
        for number in range(begin, begin + 7):
            net[1].requires_grad_(number % 3 != 1)
            net(torch.ones(2, 6) + 0.1 * (number % 4)).square().mean().backward()
            opt.step()
            opt.zero_grad()

    torch.manual_seed(0)
    net, twin = made(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).state_dict())
    train(net, twin, 0)
    ours, given = made(net.state_dict())
    opt = zcomm.ZeroOptimizer(ours, given, stage=2)
    opt.load_state_dict(twin.state_dict())
    train(net, twin, 7)
    train(ours, opt, 7)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(opt.full_state_dict()[name], value, rtol=0, atol=1e-6)
    again, other = made(opt.full_state_dict())
    other.load_state_dict(opt.state_dict())
    train(net, twin, 14)
    train(again, other, 14)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=1e-6)
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), again.parameters(), strict=True):
            mine.copy_(theirs)
    opt.load_state_dict(other.state_dict())
    train(net, twin, 21)
    train(ours, opt, 21)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(opt.full_state_dict()[name], value, rtol=0, atol=1e-6)
    opt.close()
    zcomm.shutdown()


def test_a_state_without_what_the_class_counts_is_refused() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "nadam", stage=1)
    weight = next(model.parameters())
    with pytest.raises(RuntimeError, match=r"exp_avg of .*nadam begins its state in its first step"):
        zcomm.zero.set_full_optim_state(weight, torch.ones_like(weight), "exp_avg")
    model(torch.ones(1, 24)).sum().backward()
    opt.step()
    saved = opt.state_dict()
    del saved["state"][1]["mu_product"]
    with pytest.raises(ValueError, match="lacks mu_product of nadam"):
        opt.load_state_dict(saved)
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_drive_has_no_room_for_momentum_that_comes_later(tmp_path: Path, precision: str) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, offload="nvme", nvme_path=tmp_path, precision=precision)
    opt.param_groups[0]["momentum"] = 0.9
    model(torch.ones(1, 24, dtype=next(model.parameters()).dtype)).sum().backward()
    with pytest.raises(ValueError, match=r"the drive has no room for it \(momentum was 0\): give these options at"):
        opt.step()
    opt.param_groups[0]["momentum"] = 0.0
    opt.step()
    opt.close()
    zcomm.shutdown()


def test_groups_cannot_be_added_later() -> None:
    opt = zcomm.ZeroOptimizer(network(), stage=1)
    with pytest.raises(NotImplementedError, match="add_param_group"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    opt.close()
    zcomm.shutdown()


# --- the direction of sweeps ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_sweeps_alternate_and_begin_with_what_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    small_tiles_of(monkeypatch)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    opt = zcomm.ZeroOptimizer(model, stage=2, offload=zcomm.Offload("nvme", None, fraction), nvme_path=str(tmp_path))
    state: Any = opt._live.state.kinds[0]
    seen: list[int] = []
    step_tile = state._step_tile
    monkeypatch.setattr(state, "_step_tile", lambda s, w, part: (seen.append(part.start), step_tile(s, w, part)))
    moved = []
    for _ in range(4):
        model(torch.ones(1, 64)).sum().backward()
        before = opt.stats()["swap_read_nbytes"]
        opt.step()
        opt.zero_grad()
        moved.append(opt.stats()["swap_read_nbytes"] - before)
    spans = [begin for _, begin, _ in state._spans]
    assert len(spans) == 11 and seen == 2 * (spans[::-1] + spans)
    swapped = [(bucket, begin, count) for bucket, begin, count in state._swapped]
    page = _core.page_nbytes()
    sizes = [-(-8 * count // page) * page for _, _, count in swapped]
    assert moved == 2 * [sum(sizes[:-4]), sum(sizes[4:])], "four windows still hold what the last sweep wrote"
    opt.close()
    zcomm.shutdown()


def small_tiles_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import zcomm.zero.layout.tiles
    import zcomm.zero.optim_state.nvme

    monkeypatch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
    monkeypatch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
