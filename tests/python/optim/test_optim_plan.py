"""A step's plan (zcomm/optim/plan.py) is kept only while it is valid.

Any change between steps gives the bits of an optimizer that plans every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from zcomm.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULion

SIZES = [(40, 3), (300,), (1,), (0,), (16, 16), (5000,)]
Change = Callable[[torch.optim.Optimizer, list[torch.nn.Parameter]], None]


def coded(params: Any) -> CPUAdam:
    return CPUAdam(params, weight_decay=0.1, state_dtype="8bit")


def momentum(params: Any) -> CPUSGD:
    return CPUSGD(params, momentum=0.9)


MAKERS = [CPUAdam, coded, momentum, CPUSGD, CPULion, CPUAdagrad]


class Pair:
    """Twins: ``old`` keeps its plans, ``new`` never has one."""

    def __init__(self, make: Any, dtype: torch.dtype) -> None:
        self.params = [[self._param(size, dtype, seed) for seed, size in enumerate(SIZES)] for _ in range(2)]
        self.old, self.new = (make([{"params": p[:4]}, {"params": p[4:], "lr": 1e-2}]) for p in self.params)
        self.number = 0

    @staticmethod
    def _param(size: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype))

    def change(self, change: Change) -> None:
        change(self.old, self.params[0])
        change(self.new, self.params[1])

    def gradients(self) -> None:
        self.number += 1
        for params in self.params:
            for seed, param in enumerate(params):
                generator = torch.Generator().manual_seed(1000 * self.number + seed)
                param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)

    def step(self, **options: Any) -> None:
        self.old.step(**options)
        self.new._plan, self.new._held = None, {}
        self.new.step(**options)
        for mine, twin in zip(*self.params, strict=True):
            assert torch.equal(mine, twin)
            for name, value in self.new.state[twin].items():
                assert torch.equal(torch.as_tensor(self.old.state[mine][name]), torch.as_tensor(value)), name


def drop(index: int) -> Change:
    def change(_: Any, params: list[torch.nn.Parameter]) -> None:
        params[index].grad = None

    return change


def transposed(_: Any, params: list[torch.nn.Parameter]) -> None:
    grad = params[0].grad
    assert grad is not None
    params[0].grad = grad.t().contiguous().t()
    assert not params[0].grad.is_contiguous()


def other_weight(_: Any, params: list[torch.nn.Parameter]) -> None:
    params[5].data = params[5].data.clone() * 2


def other_state(opt: Any, params: list[torch.nn.Parameter]) -> None:
    for name, value in opt.state[params[1]].items():
        if name != "remainder":
            opt.state[params[1]][name] = value.clone()


def moved_state(opt: Any, params: list[torch.nn.Parameter]) -> None:
    for name, value in opt.state[params[4]].items():
        if name not in ("remainder", "scales"):
            value.data = (value.clone() * 2).to(value.dtype)


def shared_state(opt: Any, params: list[torch.nn.Parameter]) -> None:
    for state in opt.state.values():
        for value in state.values():
            value.share_memory_()


def no_state(opt: Any, params: list[torch.nn.Parameter]) -> None:
    opt.state.clear()


def later_steps(opt: Any, params: list[torch.nn.Parameter]) -> None:
    for state in opt.state.values():
        if "step" in state:
            state["step"].add_(5)


def whole_steps(opt: Any, params: list[torch.nn.Parameter]) -> None:
    for state in opt.state.values():
        if "step" in state:
            state["step"] = torch.tensor(9)


def exchanged_state(opt: Any, params: list[torch.nn.Parameter]) -> None:
    same = torch.nn.Parameter(params[1].detach().clone())
    opt.add_param_group({"params": [same]})
    params.append(same)
    same.grad = torch.ones_like(same)
    opt.step()
    opt.state[params[1]], opt.state[same] = opt.state[same], opt.state[params[1]]


def without_last(opt: Any, params: list[torch.nn.Parameter]) -> None:
    opt.param_groups[1]["params"].pop()


def reversed_group(opt: Any, params: list[torch.nn.Parameter]) -> None:
    opt.param_groups[0]["params"].reverse()


def other_numbers(opt: Any, params: list[torch.nn.Parameter]) -> None:
    opt.param_groups[0]["lr"] = 0.5
    opt.param_groups[1]["weight_decay"] = 0.3


def reloaded(opt: Any, params: list[torch.nn.Parameter]) -> None:
    opt.load_state_dict(opt.state_dict())


CHANGES = [
    *(drop(index) for index in (0, 3, 5)),
    transposed,
    other_weight,
    other_state,
    moved_state,
    shared_state,
    no_state,
    later_steps,
    whole_steps,
    exchanged_state,
    without_last,
    reversed_group,
    other_numbers,
    reloaded,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKERS)
def test_changes_between_steps(make: Any, dtype: torch.dtype, change: Change) -> None:
    pair = Pair(make, dtype)
    for after in (3, 1):  # with a used plan, and with a new one
        for _ in range(after):
            pair.gradients()
            pair.step()
        pair.gradients()
        pair.change(change)
        pair.step()
        pair.step(norm=True, clip=0.5)
        assert pair.old.grad_norm == pair.new.grad_norm


@pytest.mark.parametrize("make", MAKERS)
def test_a_plan_serves_while_gradients_come_and_go(make: Any) -> None:
    pair = Pair(make, torch.float32)
    for _ in range(3):
        pair.gradients()
        pair.step()
    plan = pair.old._plan
    assert plan is not None
    for _ in range(3):
        pair.old.zero_grad()
        pair.gradients()
        pair.step(grad_scale=4.0)
        pair.old.step(found_inf=True)
        assert pair.old._plan is plan


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties a gradient's dtype to its weight")
def test_gradients_of_another_type() -> None:
    pair = Pair(CPUAdam, torch.float32)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16):
        pair.gradients()
        for params in pair.params:
            for param in params:
                grad, param.grad = param.grad, None
                param.grad_dtype = None
                param.grad = grad.to(dtype)
        pair.step()
        pair.step()


def test_a_refusal_updates_nothing_and_is_not_the_end() -> None:
    pair = Pair(CPUAdam, torch.float32)
    pair.gradients()
    for _ in range(3):
        pair.step()
    before = [param.detach().clone() for param in pair.params[0]]
    dense = pair.params[0][5].grad
    pair.params[0][5].grad = dense.to_sparse()
    with pytest.raises(NotImplementedError, match=r"CPUAdam: the gradient .*\(5000,\) is sparse"):
        pair.old.step()
    pair.old.param_groups[0]["params"][0].data = pair.params[0][0].data.double()
    pair.params[0][5].grad = dense
    with pytest.raises(ValueError, match=r"CPUAdam: a parameter of shape \(40, 3\) is torch.float64"):
        pair.old.step()
    pair.params[0][0].data = before[0].clone()
    assert all(map(torch.equal, before, pair.params[0]))
    assert all(float(state["step"]) == 3 for state in pair.old.state.values())
    pair.step()


def test_a_gradient_of_another_size_is_refused() -> None:
    param = torch.nn.Parameter(torch.zeros(10))
    opt = CPUAdam([param])
    param.grad = torch.zeros(10)
    for _ in range(3):
        opt.step()
    param.grad.data = torch.zeros(5)
    with pytest.raises(ValueError, match=r"shape \(10,\) has shape \(5,\)"):
        opt.step()
