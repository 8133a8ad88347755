"""Gradients that autograd adds without the optimizer's hooks: loss scale and micro-steps are applied exactly once.

Programs replace parameters (``load_state_dict(assign=True)``, ``swap_tensors``), and put their own tensors into
``p.grad``. autograd adds gradients there that are scaled by the loss scale, but not yet divided by the micro-steps. The
reference is torch.optim.SGD on the mean of all micro-steps and ranks: every update equals plain torch's, or raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow

Run = Callable[..., list[Any]]
PLACES = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3},
    {"stage": 3, "share_parameters": False},
]
SCALES = [
    {},
    {"grad_accum": 4},
    {"precision": "fp16", "loss_scale": 64.0},
    {"precision": "fp16", "loss_scale": 64.0, "grad_accum": 2},
]


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))


def loss_of(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    data = torch.Generator().manual_seed(100 * number + rank)
    return model(torch.randn(8, 6, generator=data).to(next(model.parameters()).dtype)).float().square().mean()


@contextmanager
def conversion(swap: bool) -> Any:
    future = torch.__future__
    future.set_swap_module_params_on_conversion(swap)
    future.set_overwrite_module_params_on_conversion(not swap)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(False)
        future.set_overwrite_module_params_on_conversion(False)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def swapped(model: nn.Module) -> None:
    with conversion(True):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def overwritten(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    with conversion(False):
        model.double().to(dtype)


def own_zeros(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


def own_ones(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones(param.shape, dtype=param.dtype)


BEFORE: list[tuple[Callable[[nn.Module], None], float]] = [  # action of the program, and its addend to each gradient
    (assigned, 0.0),
    (swapped, 0.0),
    (overwritten, 0.0),
    (own_zeros, 0.0),
    (own_ones, 1.0),
]


def reference(world_size: int, passes: int, extra: float) -> list[torch.Tensor]:
    model = net()
    for step in range(2):
        model.zero_grad()
        for micro in range(passes):
            for rank in range(world_size):
                (loss_of(model, rank, passes * step + micro) / passes / world_size).backward()
        with torch.no_grad():
            for param in model.parameters():
                assert param.grad is not None
                param -= 0.1 * (param.grad + (extra if step == 0 else 0.0))
    return [param.detach().clone() for param in model.parameters()]


def train() -> list[str]:
    """List differences from plain torch."""
    comm = zcomm.init(timeout=60)
    wrong = []
    for act, extra in BEFORE:
        for place in PLACES:
            for scale in SCALES:
                passes = int(scale.get("grad_accum", 1))
                model = net()
                opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, **place, **scale)
                act(model)
                for number in range(2 * passes):
                    opt.backward(loss_of(model, comm.rank, number))
                    opt.step()
                    opt.zero_grad()
                tolerance = 2e-6 if "precision" not in scale else 2e-3
                seen = opt.full_state_dict().values()
                for index, (want, here) in enumerate(zip(reference(comm.world_size, passes, extra), seen, strict=True)):
                    worst = float((want - here.float()).abs().max())
                    if not worst <= tolerance:
                        wrong.append(f"{act.__name__}, {place}, {scale}, parameter {index}: differs by {worst:.3g}")
                opt.close()
    return wrong


@pytest.mark.parametrize("world_size", [slow(1), slow(2)])
def test_scaled_gradients_count_once(run_ranks: Run, world_size: int) -> None:
    for wrong in run_ranks(train, world_size):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_assigned_amid_an_accumulation_counts_as_in_torch(world_of_one: None, place: dict[str, Any]) -> None:
    model, plain = net(), net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, grad_accum=4, **place)
    for number in range(4):
        for each, backward in ((model, opt.backward), (plain, lambda loss: (loss / 4).backward())):
            if number == 1:
                for param in each.parameters():
                    param.grad = torch.full(param.shape, 0.5)
            backward(loss_of(each, 0, number))
        opt.step()
        opt.zero_grad()
    with torch.no_grad():
        for param in plain.parameters():
            assert param.grad is not None
            param -= 0.1 * param.grad
    for want, here in zip(plain.parameters(), opt.full_state_dict().values(), strict=True):
        torch.testing.assert_close(here, want.detach(), rtol=0, atol=2e-6)
    opt.close()


def clipped(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def divided(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad / 2


@pytest.mark.parametrize("after", [clipped, divided])
def test_gradients_of_replaced_parameters_are_changed_in_true_units(
    world_of_one: None, after: Callable[[nn.Module], None]
) -> None:
    model, plain = net(), net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, precision="fp16", loss_scale=64.0)
    assigned(model)
    opt.backward(loss_of(model, 0, 0))
    loss_of(plain, 0, 0).backward()
    after(model)
    after(plain)
    opt.step()
    with torch.no_grad():
        for param, want in zip(model.parameters(), plain.parameters(), strict=True):
            assert want.grad is not None
            torch.testing.assert_close(param.float(), want - 0.1 * want.grad, rtol=0, atol=1e-3)
    opt.close()


@pytest.mark.parametrize("after", [clipped, divided])
def test_a_scaled_sum_that_the_program_changes_raises(world_of_one: None, after: Callable[[nn.Module], None]) -> None:
    model = net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, precision="fp16", loss_scale=64.0)
    own_zeros(model)
    opt.backward(loss_of(model, 0, 0))
    after(model)
    with pytest.raises(RuntimeError, match=r"0\.weight.* scaled by 64 .*changed"):
        opt.step()
    opt.zero_grad()
    opt.backward(loss_of(model, 0, 0))
    opt.step()
    opt.close()
