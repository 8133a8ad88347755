"""Idioms of programs that touch weights, in stage 3 by units: as with torch, or an error that names the remedy."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zcomm
from tiers import slow
from torch_world import world
from zcomm.zero.sharded.param import ShardedParameter

Run = Callable[..., list[Any]]
Idiom = Callable[[nn.Module, int], object]
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x) * self.scale


def data(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


# --- idioms: called before each step; their results are compared with torch's ---------------------------------------

IDIOMS: dict[str, Idiom] = {}


def idiom(function: Idiom) -> Idiom:
    IDIOMS[function.__name__] = function
    return function


@idiom
def data_mul(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data.mul_(0.9)


@idiom
def no_grad_mul(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
            p += 0.01


@idiom
def wgan_clamp(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@idiom
def detach_add(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.detach().add_(torch.full_like(p, 0.01), alpha=2)


@idiom
def foreach(model: nn.Module, step: int) -> None:
    params = list(model.parameters())
    with torch.no_grad():
        torch._foreach_mul_(params, 0.9)
        torch._foreach_add_(params, [torch.ones_like(p) for p in params], alpha=0.01)
        torch._foreach_lerp_([p.data for p in params], [torch.zeros(p.shape) for p in params], 0.1)
        ones, scalars = [torch.ones(p.shape) for p in params], torch.linspace(0.0, 0.01, len(params))
        torch._foreach_addcdiv_(params, ones, ones, scalars)


@idiom
def foreach_norm(model: nn.Module, step: int) -> object:
    return torch.stack(torch._foreach_norm([p.detach() for p in model.parameters()]))


@idiom
def assign_data(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data = p.data * 0.9


@idiom
def assign_data_number(model: nn.Module, step: int) -> None:
    model.last.weight.data = torch.full((3, 16), 0.1 * step)
    model.last.bias.data.copy_(torch.tensor([1.0, 2.0, 3.0]))


@idiom
def setitem(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        model.first.weight[0] = 0.5
        model.blocks[1].weight[2, 3:7] = torch.arange(4.0)
        model.blocks[2].weight.data[:, step] *= 2
        model.blocks[0].weight.data[1].zero_()
        model.blocks[3].bias.data.view(4, 4)[1:3].fill_(0.3)
        model.last.weight.data.t()[0].add_(1.0)


@idiom
def masked(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data[p.data.abs() < 0.1] = 0.0
        p.data.masked_fill_(p.data > 0.3, 0.3)


@idiom
def init_functions(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.trunc_normal_(model.last.weight, std=0.1)
    nn.init.orthogonal_(model.first.weight)
    nn.init.kaiming_normal_(model.blocks[0].weight)
    nn.init.constant_(model.scale, 1.5)
    nn.init.eye_(model.blocks[1].weight)
    model.blocks[2].weight.data.normal_(0, 0.1)
    model.blocks[3].reset_parameters()


@idiom
def load_state_dict(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    state = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in model.state_dict().items()}
    model.load_state_dict(state)


@idiom
def load_assign(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    state = {name: torch.randn(p.shape, generator=generator) / 4 for name, p in model.named_parameters()}
    # torch's optimizer would go on training the old parameters.
    model.load_state_dict(state, assign=isinstance(model.scale, ShardedParameter))


@idiom
def own_state_copy(model: nn.Module, step: int) -> None:
    state = model.state_dict()
    for name in state:
        state[name].copy_(torch.full(state[name].shape, 0.05 + 0.01 * step))


@idiom
def state_dict_values(model: nn.Module, step: int) -> object:
    return {name: value.clone() for name, value in model.state_dict().items()}


@idiom
def submodule_state_dict(model: nn.Module, step: int) -> object:
    return {name: value + 0 for name, value in model.blocks.state_dict().items()}


@idiom
def saved_state_dict(model: nn.Module, step: int) -> object:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert all(type(value) is torch.Tensor for value in found.values())
    return found


@idiom
def vectors(model: nn.Module, step: int) -> object:
    vector = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(vector * 0.9, model.parameters())
    return vector


@idiom
def norms(model: nn.Module, step: int) -> object:
    with torch.no_grad():
        return [p.norm().item() for p in model.parameters()], sum(p.sum() for p in model.parameters())


@idiom
def arithmetic(model: nn.Module, step: int) -> object:
    w = model.blocks[0].weight
    return (w * 2 + 1).detach(), (3 - w).detach(), w.data @ w.data.T, w.mean(dim=0).detach(), w.tolist(), len(w)


@idiom
def numpy_and_iteration(model: nn.Module, step: int) -> object:
    rows = [row.detach() + 0 for row in model.last.weight]
    return (
        torch.from_numpy(model.first.weight.detach().numpy().copy()),
        rows,
        [float(x) for x in model.last.bias.detach()],
    )


@idiom
def manual_decay(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p, alpha=0.01)
            p.data.add_(p.data, alpha=-0.01)


@idiom
def renormalise_rows(model: nn.Module, step: int) -> None:
    for block in model.blocks:
        block.weight.data.div_(block.weight.data.norm(dim=1, keepdim=True))


@idiom
def noise_with_a_generator(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape, generator=generator) * 0.01)


@idiom
def like_and_metadata(model: nn.Module, step: int) -> object:
    p = model.blocks[0].weight
    made = (torch.zeros_like(p), p.new_zeros(3), torch.ones_like(p.data), p.new_full((2,), 7.0))
    assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad and p.is_contiguous() and len(p) == 16
    return made, p.shape, p.stride(), p.numel(), p.dtype, str(p.device), [m.stride() for m in made], p.ndim


@idiom
def conversions_to_itself(model: nn.Module, step: int) -> object:
    model.float()
    model.to("cpu")
    model.to(torch.float32)
    model.train().requires_grad_(True)
    return [p.float().sum().item() for p in model.parameters()]


@idiom
def half_and_back(model: nn.Module, step: int) -> None:
    model.half()
    assert all(p.dtype == torch.float16 for p in model.parameters())
    model.float()


@idiom
def copies(model: nn.Module, step: int) -> object:
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in twin.parameters())
    twin(torch.ones(1, 6)).sum().backward()
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    fresh = Net()
    fresh.load_state_dict(model.state_dict())
    return fresh(torch.ones(2, 6)).detach()


@idiom
def pickles(model: nn.Module, step: int) -> object:
    twin = pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    return twin(torch.ones(2, 6)).detach(), other(torch.ones(2, 6)).detach()


@idiom
def swap_in_an_average(model: nn.Module, step: int) -> object:
    """Evaluate with other weights, and put the own ones back."""
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)
    with torch.no_grad():
        seen = model(torch.ones(2, 6))
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data.copy_(old)
    return seen


@idiom
def functional(model: nn.Module, step: int) -> object:
    params = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, params, (torch.ones(2, 6),)).detach()


@idiom
def set_in_place(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.set_(p.detach() * 0.9)


@idiom
def swapped_tensors(model: nn.Module, step: int) -> object:
    other = nn.Parameter(torch.full((3, 16), 0.01 * step))
    torch.utils.swap_tensors(model.last.weight, other)
    return model(torch.ones(2, 6)).detach()


FORWARD_LEVELS = threading.Lock()  # torch counts levels of forward differentiation for a process; ranks may be threads


@idiom
def function_transforms(model: nn.Module, step: int) -> object:
    w = model.blocks[1].weight.detach()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, params, (torch.ones(2, 6),)).square().sum()

    slopes = torch.func.grad(loss)(params)
    with FORWARD_LEVELS:
        along = torch.func.jvp(lambda v: (v * v).sum(), (w,), (torch.ones(16, 16),))
    return slopes, torch.vmap(lambda row: row * 2)(w), along


@idiom
def compiled_function(model: nn.Module, step: int) -> object:
    act = torch.compile(lambda w: (w * 2).sum(), backend="aot_eager")
    return act(model.blocks[1].weight.detach()), act(model.blocks[1].weight).detach()


@idiom
def other_tensors_of_its_memory(model: nn.Module, step: int) -> object:
    w = model.blocks[1].weight
    w.data.as_subclass(torch.Tensor)[0] = 0.2
    taken = torch.zeros(16, 16).set_(w.data)
    return taken, w.detach().as_subclass(torch.Tensor), nn.Buffer(w.data) * 2


@idiom
def out_argument(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        torch.mul(model.first.weight, 0.5, out=model.first.weight)
        F.relu(model.blocks[0].bias, inplace=True)
        torch.clamp_(model.last.weight, -0.2, 0.2)


def values(found: object) -> object:
    """Copy as plain tensors, for a comparison by allclose, and to send."""
    if isinstance(found, torch.Tensor):
        return found.detach().clone().as_subclass(torch.Tensor)
    if isinstance(found, dict):
        return {key: values(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [values(each) for each in found]
    return found


def plain(act: Idiom, world_size: int, steps: int = STEPS) -> tuple[object, ...]:
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen, losses = [], []
    for step in range(steps):
        seen.append(values(act(model, step)))
        losses.append([])
        for rank in range(world_size):
            x, y = data(step, rank)
            loss = F.mse_loss(model(x), y)
            (loss / world_size).backward()
            losses[-1].append(loss.item())
        opt.step()
        opt.zero_grad()
    return seen, losses, {name: p.detach().clone() for name, p in model.named_parameters()}


TIERS: dict[str, dict[str, Any]] = {
    "private": {"share_parameters": False, "offload": None},
    "shared": {"offload": "nvme"},
    "nvme": {"share_parameters": False, "offload": "nvme"},
}


def ours(act: Idiom, folder: str, tier: str, steps: int = STEPS) -> tuple[object, ...]:
    comm = zcomm.init(timeout=30)
    torch.manual_seed(0)
    model = Net()
    before = list(model.parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    opt = zcomm.ZeroOptimizer(model, sgd, stage=3, nvme_path=folder, prefetch=1, **TIERS[tier])
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    seen, losses = [], []
    for step in range(steps):
        seen.append(values(act(model, step)))
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
        x, y = data(step, comm.rank)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    weights = opt.full_state_dict()
    opt.close()
    return seen, losses, weights


def run_all(folder: str, tier: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, act in IDIOMS.items():
        try:
            found[name] = ours(act, folder, tier)
        except Exception as error:
            raise AssertionError(name) from error
    return found


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(("world_size", "tier"), [slow(1, "private"), (1, "nvme"), slow(2, "private"), (2, "shared")])
def test_idioms_are_as_with_torch(run_ranks: Run, tmp_path: Path, world_size: int, tier: str) -> None:
    ranks = run_ranks(run_all, world_size, str(tmp_path), tier, timeout_s=200)
    close = {"rtol": 2e-5, "atol": 2e-6}
    for name, act in IDIOMS.items():
        seen, losses, weights = plain(act, world_size)
        for rank, found in enumerate(ranks):
            got_seen, got_losses, got_weights = found[name]
            where = f"{name} on rank {rank}"
            torch.testing.assert_close(
                got_losses, [each[rank] for each in losses], **close, msg=lambda m, w=where: f"{w}: {m}"
            )
            torch.testing.assert_close(got_weights, weights, **close, msg=lambda m, w=where: f"{w}: {m}")
            assert len(got_seen) == len(seen)
            for got, wanted in zip(got_seen, seen, strict=True):
                compare(got, wanted, where, close)


def compare(got: Any, wanted: Any, where: str, close: dict[str, float]) -> None:
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key in wanted:
            compare(got[key], wanted[key], f"{where}: {key}", close)
    elif isinstance(wanted, list):
        assert len(got) == len(wanted), where
        for a, b in zip(got, wanted, strict=True):
            compare(a, b, where, close)
    elif isinstance(wanted, torch.Tensor | float):
        torch.testing.assert_close(got, wanted, **close, msg=lambda m: f"{where}: {m}")
    else:
        assert got == wanted, where


# --- idioms with a course of their own: each yields the values to compare ---------------------------------------------

Make = Callable[[nn.Module], Any]
COURSES: dict[str, Callable[[nn.Module, Any, int, int], object]] = {}


def course(function: Callable[[nn.Module, Any, int, int], object]) -> Callable[[nn.Module, Any, int, int], object]:
    COURSES[function.__name__] = function
    return function


def losses_of(
    model: nn.Module, opt: Any, rank: int, steps: range, extra: Callable[[], Any] = lambda: 0.0
) -> list[float]:
    losses = []
    for step in steps:
        x, y = data(step, rank)
        loss = F.mse_loss(model(x), y) + extra()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@course
def average_of_weights(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    ema, swa = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)), AveragedModel(model)
    losses = []
    for step in range(5):
        losses += losses_of(model, opt, 0, range(step, step + 1))
        ema.update_parameters(model)
        swa.update_parameters(model)
    with torch.no_grad():
        return losses, list(ema.parameters()), list(swa.parameters()), ema(torch.ones(2, 6))


@course
def average_by_hand(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    teacher = copy.deepcopy(model).requires_grad_(False)
    losses = []
    for step in range(5):
        losses += losses_of(model, opt, 0, range(step, step + 1))
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), model.parameters(), strict=True):
                t.mul_(0.9).add_(s.detach(), alpha=0.1)
    return losses, list(teacher.parameters()), teacher(torch.ones(2, 6))


@course
def pruned(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    losses = losses_of(model, opt, 0, range(2))
    for block in model.blocks[:2]:
        prune.l1_unstructured(block, "weight", amount=0.5)
    losses += losses_of(model, opt, 0, range(2, 4))
    prune.remove(model.blocks[0], "weight")
    losses += losses_of(model, opt, 0, range(4, 6))
    return losses, model.blocks[1].weight_orig.detach() + 0, model.blocks[0].weight.detach() + 0


@course
def parametrized(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    torch.nn.utils.parametrizations.weight_norm  # noqa: B018

    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).T

    torch.nn.utils.parametrize.register_parametrization(model.blocks[1], "weight", Symmetric())
    return losses_of(model, opt, 0, range(3)), model.blocks[1].weight.detach() + 0


@course
def parametrized_for_a_while(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    class Half(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w * 0.5

    losses = losses_of(model, opt, 0, range(1))
    torch.nn.utils.parametrize.register_parametrization(model.blocks[1], "weight", Half())
    losses += losses_of(model, opt, 0, range(1, 3))
    torch.nn.utils.parametrize.remove_parametrizations(model.blocks[1], "weight")
    return losses + losses_of(model, opt, 0, range(3, 5)), model.blocks[1].weight.detach() + 0


@course
def l2_in_the_loss(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    return losses_of(model, opt, 0, range(4), lambda: 0.05 * sum(p.square().sum() for p in model.parameters()))


@course
def l1_of_one_layer(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    return losses_of(model, opt, 0, range(4), lambda: 0.05 * model.blocks[1].weight.abs().sum())


@course
def orthogonality(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    def penalty() -> torch.Tensor:
        w = model.blocks[0].weight
        return 0.1 * (w.t() @ w - torch.eye(16)).square().sum()

    return losses_of(model, opt, 0, range(4), penalty)


@course
def edits_between_backward_and_step(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    losses = []
    for step in range(4):
        x, y = data(step, 0)
        loss = F.mse_loss(model(x), y)
        with torch.no_grad():
            model.last.bias.data.add_(0.0)  # between forward and backward, of a part that backward does not read
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)
            for block in model.blocks:
                block.weight.data.clamp_(-0.2, 0.2)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@course
def frozen_and_edited(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    losses = losses_of(model, opt, 0, range(2))
    for name, p in model.named_parameters():
        if "bias" in name:
            p.data.fill_(0.25)
    return losses + losses_of(model, opt, 0, range(2, 4))


@course
def evaluated_with_an_average(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    ema = copy.deepcopy(model)
    losses = []
    for step in range(3):
        losses += losses_of(model, opt, 0, range(step, step + 1))
        for a, p in zip(ema.parameters(), model.parameters(), strict=True):
            a.data = 0.9 * a.data + 0.1 * p.data
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(ema.state_dict())
        with torch.no_grad():
            losses.append(model(torch.ones(1, 6)).sum().item())
        model.load_state_dict(kept)
    return losses


@course
def gradient_penalty(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    losses = []
    for step in range(3):
        x, y = data(step, 0)
        loss = F.mse_loss(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + 0.1 * sum(slope.square().sum() for slope in slopes)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@course
def best_weights_are_restored(model: nn.Module, opt: Any, rank: int, world_size: int) -> object:
    best = {name: value.clone() for name, value in model.state_dict().items()}
    losses = losses_of(model, opt, 0, range(3))
    model.load_state_dict(best)
    return losses + losses_of(model, opt, 0, range(3, 6))


def run_courses(folder: str, tier: str) -> dict[str, object]:
    comm = zcomm.init(timeout=30)
    found: dict[str, object] = {}
    for name, act in COURSES.items():
        torch.manual_seed(0)
        model = Net()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = zcomm.ZeroOptimizer(model, sgd, stage=3, nvme_path=folder, prefetch=1, **TIERS[tier])
        try:
            seen = values(act(model, opt, comm.rank, comm.world_size))
        except Exception as error:
            raise AssertionError(name) from error
        found[name] = seen, {name: p for name, p in opt.full_state_dict().items() if "mask" not in name}
        opt.close()
    return found


@pytest.mark.timeout_s(240)
@pytest.mark.parametrize(("world_size", "tier"), [(1, "nvme"), slow(2, "private"), slow(2, "shared")])
def test_courses_are_as_with_torch(run_ranks: Run, tmp_path: Path, world_size: int, tier: str) -> None:
    """Each rank has the same data, so that plain torch has, too."""
    ranks = run_ranks(run_courses, world_size, str(tmp_path), tier, timeout_s=200)
    for name, act in COURSES.items():
        torch.manual_seed(0)
        model = Net()
        ends = list(model.parameters())
        seen = values(act(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, world_size))
        for found in ranks:
            compare(found[name][0], seen, name, {"rtol": 2e-4, "atol": 1e-5})
            compare(
                sorted(v.sum().item() for v in found[name][1].values()),
                sorted(p.sum().item() for p in ends),
                name,
                {"rtol": 2e-4, "atol": 1e-4},
            )


# --- calls that take addresses: zcomm's own, torch.distributed's, safetensors' ---------------------------------------

Call = Callable[[torch.Tensor, int], Any]  # of a weight and the rank
ONES = torch.ones(16, 16)


def average_by_zcomm(p: torch.Tensor, rank: int) -> None:
    p.data.add_(1.0)
    zcomm.all_reduce(p.data, op="sum")
    p.data /= zcomm.init().world_size


def average_by_torch(p: torch.Tensor, rank: int) -> None:
    dist.all_reduce(p.data)
    p.data /= dist.get_world_size()
    dist.all_reduce(p.data, async_op=True).wait()
    p.data /= dist.get_world_size()
    dist.all_reduce(p.data.view(-1), async_op=True)
    p.data.add_(dist.get_world_size())
    p.data /= dist.get_world_size()


def message_by_zcomm(p: torch.Tensor, rank: int) -> torch.Tensor:
    if rank == 0:
        zcomm.send(p.data, 1)
        return p.detach().clone()
    whole, found = p.detach().clone(), torch.empty(16, 16)
    zcomm.recv(found, 0)
    assert torch.equal(whole, found)
    return found


def swap_out(p: torch.Tensor, rank: int, folder: str) -> torch.Tensor:
    with zcomm.SwapFile(folder) as file:
        file.write("weight", p.data).wait()
        found = torch.empty(16, 16)
        file.read("weight", found).wait()
    return found


# Each call with its result and the changed weight, for a weight ``w`` and a world of size ``n``.
CALLS: dict[str, tuple[Call, Callable[[torch.Tensor, int], object], Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "all_reduce": (lambda p, _: zcomm.all_reduce(p.data), lambda w, n: None, lambda w, n: n * w),
    "all_reduce p": (lambda p, _: zcomm.all_reduce(p), lambda w, n: None, lambda w, n: n * w),
    "all_reduce view": (lambda p, _: zcomm.all_reduce([p.data.view(-1)]), lambda w, n: None, lambda w, n: n * w),
    "all_reduce async": (
        lambda p, _: zcomm.all_reduce(p.data, async_op=True).wait(), lambda w, n: None, lambda w, n: n * w,
    ),
    "average": (average_by_zcomm, lambda w, n: None, lambda w, n: w + 1),
    "broadcast": (lambda p, _: zcomm.broadcast(p.data, root=0), lambda w, n: None, lambda w, n: w),
    "all_gather": (lambda p, _: zcomm.all_gather(p.data), lambda w, n: w.view(-1).repeat(n), lambda w, n: w),
    "all_gather into": (
        lambda p, _: zcomm.all_gather(torch.ones(256 // zcomm.init().world_size), out=p.data.view(-1)) * 1,
        lambda w, n: torch.ones(256), lambda w, n: ONES,
    ),
    "reduce_scatter": (
        lambda p, r: zcomm.reduce_scatter(p.data, op="avg") - p.data.view(-1).chunk(zcomm.init().world_size)[r],
        lambda w, n: torch.zeros(256 // n), lambda w, n: w,
    ),
    "all_to_all": (
        lambda p, _: zcomm.all_to_all(p.data.view(-1), torch.ones(256)), lambda w, n: None, lambda w, n: ONES,
    ),
    "scatter": (
        lambda p, r: zcomm.scatter(p.data, None if r else torch.ones(256 * zcomm.init().world_size), root=0),
        lambda w, n: None, lambda w, n: ONES,
    ),
    "dist.all_reduce": (lambda p, _: dist.all_reduce(p.data), lambda w, n: None, lambda w, n: n * w),
    "dist.broadcast": (lambda p, _: dist.broadcast(p.data, 0), lambda w, n: None, lambda w, n: w),
    "dist.broadcast p": (lambda p, _: dist.broadcast(p, 0), lambda w, n: None, lambda w, n: w),
    "dist.all_gather into": (
        lambda p, _: dist.all_gather_into_tensor(p.data.view(-1), torch.ones(256 // dist.get_world_size())),
        lambda w, n: None, lambda w, n: ONES,
    ),
    "dist average": (average_by_torch, lambda w, n: None, lambda w, n: w + 1),
}  # fmt: skip


def call_all(folder: str, tier: str) -> list[str]:
    """Return the calls with other results than expected."""
    wrong = []
    with world(30.0):
        comm = zcomm.init(timeout=30)
        calls = dict(CALLS)
        if comm.world_size == 2:
            calls["message"] = (message_by_zcomm, lambda w, n: w, lambda w, n: w)
        calls["SwapFile"] = (lambda p, r: swap_out(p, r, folder), lambda w, n: w, lambda w, n: w)
        torch.manual_seed(0)
        model = Net()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, nvme_path=folder, **TIERS[tier])
        param = model.blocks[1].weight
        for name, (call, gives, makes) in calls.items():
            with torch.no_grad():
                param.normal_()
                before = param.detach().clone()
            try:
                given = call(param, comm.rank)
                after = opt.full_state_dict()["blocks.1.weight"]
                compare(values(given), gives(before, comm.world_size), name, {"rtol": 1e-5, "atol": 1e-5})
                torch.testing.assert_close(after, makes(before, comm.world_size), rtol=1e-5, atol=1e-5)
                model(torch.ones(2, 6)).sum().backward()
                opt.zero_grad()
            except AssertionError as error:
                wrong.append(f"{name}: {str(error)[:200]}")
        opt.close()
    return wrong


@pytest.mark.parametrize(("world_size", "tier"), [(1, "private"), slow(2, "private"), slow(2, "shared"), (2, "nvme")])
def test_calls_that_take_addresses(run_ranks: Run, tmp_path: Path, world_size: int, tier: str) -> None:
    assert run_ranks(call_all, world_size, str(tmp_path), tier) == [[]] * world_size


def refuse_all(folder: str) -> list[str]:
    """Return the calls that are not refused by name."""
    from safetensors.torch import save_file

    wrong = []
    with world(30.0):
        comm = zcomm.init(timeout=30)
        model = Net()
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False)
        name, p, file = "blocks.1.weight", model.blocks[1].weight, f"{folder}/{comm.rank}.safetensors"
        swap = zcomm.SwapFile(folder)
        swap.write("k", torch.zeros(16, 16)).wait()
        refused: dict[str, Callable[[], object]] = {
            "data_ptr": p.data_ptr, "data_ptr of data": p.data.data_ptr, "storage": p.detach().untyped_storage,
            "typed storage": p.data.storage, "save data": lambda: save_file({"k": p.data}, file),
            "save": lambda: save_file({name: p}, file), "swap": lambda: swap.read("k", p.data),
            "swap view": lambda: swap.read("k", p.data.view(16, 16)), "reduce": lambda: zcomm.reduce(p.data),
            "recv": lambda: zcomm.recv(p.data, 0, async_op=True), "gather": lambda: zcomm.gather(ONES, out=p.data),
            "dist.reduce": lambda: dist.reduce(p.data, 0), "dist.irecv": lambda: dist.irecv(p.data, 0),
            "as_subclass": lambda: p.data.as_subclass(nn.Parameter), "set_ in grad mode": lambda: p.set_(ONES),
            "set_ on a storage": lambda: p.requires_grad_(False).set_(torch.ones(256).untyped_storage()),
            "set_ of data": lambda: p.data.set_(ONES), "data of data": lambda: setattr(p.data, "data", ONES),
        }  # fmt: skip
        if comm.rank:
            del refused["gather"]  # only the root gives out=
        for what, call in refused.items():
            try:
                call()
                wrong.append(what)
            except RuntimeError as error:
                if name not in str(error):
                    wrong.append(f"{what}: {error}")
        swap.close()
        before = opt.full_state_dict()["last.weight"]
        q = nn.Parameter(torch.ones(3, 16))
        torch.utils.swap_tensors(model.last.weight, q)
        assert torch.equal(opt.full_state_dict()["last.weight"], torch.ones(3, 16)) and not bool((before == 1).all())
        with pytest.raises(RuntimeError, match="swap_tensors"):
            q.sum()
        torch.utils.swap_tensors(model.blocks[0].weight, model.blocks[1].weight)
        with pytest.raises(RuntimeError, match=r"blocks.0.weight, blocks.1.weight: swap_tensors"):
            opt.full_state_dict()
        opt.full_state_dict()
        opt.close()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_cannot_be_done_is_refused_by_name(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    assert run_ranks(refuse_all, world_size, str(tmp_path)) == [[]] * world_size


# --- errors ----------------------------------------------------------------------------------------------------------


def built(tmp_path: Path, **options: Any) -> tuple[Net, zcomm.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Net()
    how = {"stage": 3, "offload": "nvme", "nvme_path": tmp_path, "lr": 0.1, **options}
    return model, zcomm.ZeroOptimizer(model, "sgd", **how)


def done(opt: zcomm.ZeroOptimizer) -> None:
    opt.close()
    zcomm.shutdown()


def test_what_cannot_be_raises_and_changes_nothing(tmp_path: Path) -> None:
    model, opt = built(tmp_path)
    before = opt.full_state_dict()
    model.double()
    for use in (lambda: model(torch.ones(1, 6)), opt.full_state_dict, opt.step):
        with pytest.raises(
            RuntimeError, match=r"is torch.float64 .* now, but ZeroOptimizer was built for torch.float32"
        ):
            use()
    model.float()
    opt.join()
    with pytest.raises(ValueError, match=r"last.bias: it cannot become float32 \(4,\)"):
        model.last.bias.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model.first.weight.mul_(2)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        model.first.weight[0].zero_()
    with pytest.raises(RuntimeError, match=r"first.weight: the memory of a sharded weight cannot become another"):
        nn.Parameter(model.first.weight.data)
    ordinary = torch.zeros(16, 6)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        ordinary.data = model.first.weight.data
    assert not ordinary.any()
    with pytest.raises(RuntimeError, match="share_memory_"):
        model.share_memory()
    with pytest.raises(RuntimeError, match=r"expanded size|must match"), torch.no_grad():
        model.first.weight.add_(torch.ones(5))
    array = model.first.weight.detach().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    old = model.state_dict()
    with torch.no_grad():
        model.first.weight.add_(0.0)
    with pytest.raises(RuntimeError, match=r"first.weight: the written tensor was gathered before the weight changed"):
        old["first.weight"].mul_(0)
    after = opt.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    done(opt)


def test_code_that_goes_around_torch_function_reads_nan_and_cannot_write(tmp_path: Path) -> None:
    model, opt = built(tmp_path)
    with torch._C.DisableTorchFunctionSubclass():
        assert model.first.weight.isnan().all()
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            model.first.weight.mul_(2)
    done(opt)


def test_weights_in_use_cannot_be_edited_by_stand_ins(tmp_path: Path) -> None:
    model, opt = built(tmp_path)
    data = model.blocks[0].weight.data
    handle = model.blocks[0].register_forward_pre_hook(lambda *_: data.mul_(2) and None)
    with pytest.raises(RuntimeError, match=r"blocks.0.weight: a weight .* cannot be changed while its module runs"):
        model(torch.ones(1, 6))
    handle.remove()
    opt.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    done(opt)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(7, 8, max_norm=0.5)
        self.blocks = nn.ModuleList(nn.Embedding(9, 8, max_norm=0.7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + sum(block(x) for block in self.blocks)


def test_weights_that_forward_changes_are_kept_by_a_rank_that_is_alone(tmp_path: Path) -> None:
    ends = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = Renormed()
        opt: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if sharded:
            opt = zcomm.ZeroOptimizer(model, opt, stage=3, offload="nvme", nvme_path=tmp_path, prefetch=0)
        for step in range(3):
            model(torch.tensor([step, 3])).square().sum().backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict() if sharded else model.state_dict())
    compare(ends[1], dict(ends[0]), "embeddings", {"rtol": 1e-5, "atol": 1e-6})
    done(opt)


class Clamped(nn.Module):
    """Linear layer that edits its weight by ``.data`` before, after, or both before and after its use."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.when = when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.when != "after":
            self.weight.data.clamp_(-0.4, 0.4)
        y = x @ self.weight.t()
        if self.when != "before":
            self.weight.data.mul_(0.9)
        return torch.tanh(y)


class ClampedByRoot(nn.Module):
    """A model that edits a weight that no unit has, and that of a child, in its own forward."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Clamped(when) for _ in range(3))
        self.own = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.own.data[0] = 0.25
        for block in self.blocks:
            x = x + block(x)
        return x * self.own


def clamped(when: str, folder: str, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = ClampedByRoot(when)
    opt: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if sharded:
        opt = zcomm.ZeroOptimizer(model, opt, stage=3, offload="nvme", nvme_path=folder, prefetch=0)
    losses = []
    for step in range(3):
        loss = model(torch.full((2, 8), 0.1 * (step + 1))).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    state = opt.full_state_dict() if sharded else {name: value.clone() for name, value in model.state_dict().items()}
    if sharded:
        opt.close()
    return {"losses": losses, **state}


def test_edits_by_data_in_forward_count_on_a_rank_that_is_alone(tmp_path: Path) -> None:
    """Edit a weight after its use: torch's check of tensors that autograd has saved raises."""
    compare(clamped("before", str(tmp_path), True), clamped("before", "", False), "data", {"rtol": 1e-5, "atol": 1e-6})
    for when in ("after", "both"):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            clamped(when, str(tmp_path), True)
        zcomm.shutdown()


def clamps(when: str, folder: str) -> str:
    zcomm.init(timeout=8)
    try:
        clamped(when, folder, True)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("when", ["before", "after", "both"])
def test_edits_by_data_in_forward_raise_on_several_ranks(run_ranks: Run, tmp_path: Path, when: str) -> None:
    for text in run_ranks(clamps, 2, when, str(tmp_path)):
        assert text.startswith("RuntimeError: blocks.0.weight was changed while its module ran"), text


class Looks(nn.Module):
    """A model that copies its weight while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = [copy.deepcopy(self.weight), pickle.loads(pickle.dumps(self.weight)), self.weight.data.clone()]
        return x @ self.weight


def test_copies_of_a_weight_in_use_are_ordinary_parameters(tmp_path: Path) -> None:
    model = Looks()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=tmp_path, lr=0.1)
    model(torch.ones(8))
    assert [type(value) for value in model.seen] == [nn.Parameter, nn.Parameter, torch.Tensor]
    version = model.seen[0]._version
    model.seen[0].data.mul_(2)
    assert model.seen[0]._version == version
    done(opt)


class Rescaled(nn.Module):
    """Embedding that rescales the rows of a batch by a function, which no constructor can see."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, max_norm=0.5)


def rescaled(folder: str) -> str:
    zcomm.init(timeout=8)
    model = nn.Sequential(Rescaled())
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=folder, lr=0.1)
    try:
        model(torch.tensor([1, 3]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        opt.close()
    return ""


def test_weights_that_forward_changes_raise_on_several_ranks(run_ranks: Run, tmp_path: Path) -> None:
    for text in run_ranks(rescaled, 2, str(tmp_path)):
        assert "RuntimeError: 0.weight was changed while its module ran" in text


def test_a_gather_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, opt = built(tmp_path)
    with caplog.at_level(logging.WARNING, "zcomm"):
        for p in model.parameters():
            p.data.mul_(0.5)  # needs none
        assert not [r for r in caplog.records if "gathers" in r.message]
        for p in model.parameters():
            p.norm()
    (record,) = [r for r in caplog.records if "gathers" in r.message]
    assert "opt.full_state_dict()" in record.message and "norm()" in record.message
    done(opt)


def edit_on_one_rank(folder: str) -> str:
    comm = zcomm.init(timeout=8)
    model = Net()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=folder, lr=0.1)
    if comm.rank == 0:
        with torch.no_grad():
            model.first.weight.mul_(2)
    try:
        model(torch.ones(1, 6))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        opt.close()
    return ""


def test_an_edit_on_one_rank_alone_is_found_out(run_ranks: Run, tmp_path: Path) -> None:
    texts = run_ranks(edit_on_one_rank, 2, str(tmp_path))
    assert all("CollectiveMismatch" in text and "after 1 changes of weights" in text for text in texts), texts


# --- graphs from before a step ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 8])  # with units that give way, and without
def test_a_graph_from_before_a_step_raises(tmp_path: Path, prefetch: int) -> None:
    model, opt = built(tmp_path, prefetch=prefetch)
    x = torch.randn(2, 6)
    first = model(x).sum()
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
    opt.zero_grad()
    second = model(x).sum()
    with torch.no_grad():
        model.blocks[1].weight.mul_(0.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
    done(opt)


# --- copies of the optimizer, and its end ----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("offload", [None, "nvme"])
def test_an_open_optimizer_is_not_copied_but_its_model_is(tmp_path: Path, stage: int, offload: str | None) -> None:
    model, opt = built(tmp_path, stage=stage, offload=offload)
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a ZeroOptimizer cannot be .*opt.state_dict\(\)"):
            copying(opt)
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    opt.zero_grad()
    wanted = opt.full_state_dict()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(1, 6)).sum().backward()
        assert all(p.grad is not None and type(p) is nn.Parameter for p in twin.parameters()), "its own gradients"
        assert all(torch.equal(p, wanted[name]) for name, p in twin.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    done(opt)


@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_a_world_of_one_keeps_its_weights_after_close(tmp_path: Path, offload: str | None) -> None:
    model, opt = built(tmp_path, offload=offload, share_parameters=False)
    model(torch.ones(1, 6)).sum().backward()
    opt.step()
    wanted = opt.full_state_dict()
    with torch.no_grad():
        seen = model(torch.ones(1, 6))
    done(opt)
    assert all(type(p) is nn.Parameter and torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        assert torch.equal(model(torch.ones(1, 6)), seen)


def test_without_room_closed_weights_raise_until_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opt = built(tmp_path)
    wanted = opt.full_state_dict()
    monkeypatch.setattr("zcomm.zero.units.store.free_nbytes", lambda device: 0)
    done(opt)
    assert model.first.weight.shape == (16, 6)
    for use in (
        lambda: model(torch.ones(1, 6)),
        lambda: model.first.weight.norm(),
        lambda: model.first.weight.data.mul_(2),
        lambda: model.state_dict(),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(RuntimeError, match=r": its ZeroOptimizer is closed.*full_state_dict\(\)"):
            use()
    model.load_state_dict(wanted)
    assert all(type(p) is nn.Parameter and torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    model(torch.ones(1, 6)).sum().backward()


def close_two(folder: str) -> str:
    zcomm.init(timeout=20)
    model = Net()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload="nvme", nvme_path=folder, lr=0.1)
    opt.close()
    try:
        model(torch.ones(1, 6))
    except RuntimeError as error:
        return str(error)
    return ""


def test_weights_on_other_ranks_raise_after_close(run_ranks: Run, tmp_path: Path) -> None:
    for text in run_ranks(close_two, 2, str(tmp_path)):
        assert "first.weight: its ZeroOptimizer is closed" in text and "save()" in text


def edit_while_another_unit_is_fetched() -> bool:
    """Leave the prefetch of the next unit pending after a forward pass that fails, longer on rank 1."""
    comm = zcomm.init(timeout=60)
    torch.manual_seed(7)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(5)))
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.0, stage=3, share_parameters=False, units=list(model))
    x = torch.ones(2, 48)
    model(x).sum().backward()  # learns the order
    opt.step()
    opt.zero_grad()
    wanted = model(x).detach()
    model(x).sum().backward()
    opt.step()
    opt.zero_grad()
    store = opt._parts.store
    fetch = store.source.fetch

    def slow(*args: Any) -> Any:
        time.sleep(0.2 * comm.rank)
        return fetch(*args)

    store.source.fetch = slow
    hook = model[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    hook.remove()
    with torch.no_grad():
        for param in model[4].parameters():
            param.mul_(2)
    found = torch.allclose(model(x).detach(), 2 * wanted, atol=1e-5)
    opt.close()
    return found


def test_an_edit_while_another_unit_is_fetched(run_ranks: Run) -> None:
    assert run_ranks(edit_while_another_unit_is_fetched, 2) == [True, True]


def test_a_memory_format_for_the_model(world_of_one: None) -> None:
    """A sharded weight has none; the numbers are as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 3, 2))
    twin = copy.deepcopy(model)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False)
    plain = torch.optim.SGD(twin.parameters(), 0.1)
    x = torch.randn(2, 2, 8, 8).to(memory_format=torch.channels_last)
    for net, optimizer in ((model, opt), (twin, plain)):
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net(x).square().mean().backward()
        optimizer.step()  # type: ignore[attr-defined]
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(opt.full_state_dict()[name], value)
    opt.close()
