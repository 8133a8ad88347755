"""CPUAdam as a drop-in: torch's numbers, torch's interface, exact masters for bf16."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import zcomm

SHAPES = [(3,), (17, 5), (64, 64), (1,), (0,), (130,)]


def params(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def steps(opt: torch.optim.Optimizer, tensors: list[torch.nn.Parameter], count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(100 + step)
        for param in tensors:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        opt.step()


@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_equals_torch(adamw: bool, maximize: bool, weight_decay: float) -> None:
    ours, theirs = params(), params()
    torch_class = torch.optim.AdamW if adamw else torch.optim.Adam
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": weight_decay, "maximize": maximize}
    steps(zcomm.optim.CPUAdam(ours, adamw=adamw, **options), ours, 20)
    steps(torch_class(theirs, **options), theirs, 20)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


def test_bf16_keeps_an_exact_master() -> None:
    """Tiny updates, each below the last bit of a bf16 weight, add up as they do in fp32."""
    weight16 = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    weight32 = torch.nn.Parameter(torch.ones(256))
    opt16, opt32 = (zcomm.optim.CPUAdam([w], lr=1e-4, adamw=True) for w in (weight16, weight32))
    for _ in range(200):
        weight16.grad = torch.ones_like(weight16)
        weight32.grad = torch.ones_like(weight32)
        opt16.step()
        opt32.step()
    remainder = opt16.state[weight16]["remainder"].to(torch.int32)
    high = weight16.detach().view(torch.int16).to(torch.int32) << 16
    master = (high + remainder).view(torch.float32)
    assert torch.equal(master, weight32.detach())
    assert weight32[0] < 0.99, "the updates must have added up"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dict_resumes_to_the_bit(dtype: torch.dtype) -> None:
    straight, resumed = params(dtype), params(dtype)
    steps(zcomm.optim.CPUAdam(straight, lr=1e-2), straight, 10)
    first = zcomm.optim.CPUAdam(resumed, lr=1e-2)
    steps(first, resumed, 5)
    second = zcomm.optim.CPUAdam(resumed, lr=1e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, resumed, 5, first=5)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


def test_loads_from_and_into_torch() -> None:
    ours, theirs = params(), params()
    torch_opt = torch.optim.AdamW(theirs, lr=1e-2)
    steps(torch_opt, theirs, 5)
    for a, b in zip(ours, theirs, strict=True):
        a.data.copy_(b.data)
    opt = zcomm.optim.CPUAdam(ours, lr=1e-2)
    opt.load_state_dict(copy.deepcopy(torch_opt.state_dict()))
    steps(opt, ours, 5, first=5)
    back = torch.optim.AdamW(params(), lr=1e-2)
    back.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps(torch_opt, theirs, 5, first=5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}])
def test_bad_arguments_are_named(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=name):
        zcomm.optim.CPUAdam(params(), **options)


def test_other_dtypes_are_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="float64"):
        zcomm.optim.CPUAdam([weight]).step()
