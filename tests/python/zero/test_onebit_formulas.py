"""The 1-bit optimizers on one rank, which encodes nothing, against their formulas in float64.

The losses are linear in the weights, so gradients do not depend on them, and each reference is a recurrence. With
``bias_correction=False`` the formulas are DeepSpeed's (deepspeed/runtime/fp16/onebit, a world of one).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

SHAPES = {"a": (40,), "b": (7, 5)}
STEPS, FREEZE = 24, 6
LR, BETAS, EPS, DECAY = 0.01, (0.8, 0.9), 1e-8, 0.1
ZERO_ONE = {"var_freeze_step": 9, "var_update_scaler": 2, "local_step_scaler": 3, "local_step_clipper": 4}
Values = dict[str, torch.Tensor]


class Linear(nn.Module):
    """A loss that is linear in its parameters: the sum of their products with gradients that are given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, grads: Values) -> torch.Tensor:
        return sum(((param * grads[name]).sum() for name, param in self.named_parameters()), torch.zeros(()))


def gradients(step: int) -> Values:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) * (0.1 + 0.05 * step) for name, shape in SHAPES.items()}


def begin() -> tuple[Values, Values, Values]:
    """Return weights and both moments, float64."""
    x = {name: param.detach().double() for name, param in Linear().named_parameters()}
    return x, {n: torch.zeros_like(w) for n, w in x.items()}, {n: torch.zeros_like(w) for n, w in x.items()}


def norm(values: torch.Tensor) -> float:
    return float(values.square().sum().sqrt())


def adam(corrects: bool) -> Values:
    (b1, b2), (x, m, v) = BETAS, begin()
    for t in range(1, STEPS + 1):
        for n, g in gradients(t).items():
            m[n] = b1 * m[n] + (1 - b1) * g.double()
            if t <= FREEZE:
                v[n] = b2 * v[n] + (1 - b2) * g.double().square()
            first, second = (1 - b1**t, 1 - b2 ** min(t, FREEZE)) if corrects else (1.0, 1.0)
            x[n] = x[n] - LR * (m[n] / first / ((v[n] / second).sqrt() + EPS) + DECAY * x[n])
    return x


def zero_one_adam(corrects: bool) -> Values:
    (b1, b2), (x, m, v) = BETAS, begin()
    moved, rates = {n: torch.zeros_like(w) for n, w in x.items()}, 0.0
    interval, counter, averaged = 1, 0, 0
    local, local_counter = 1, 0
    for t in range(1, STEPS + 1):
        late = t > ZERO_ONE["var_freeze_step"]
        averages = not late and t % interval == 0
        averaged += averages
        first, second = (1 - b1**t, 1 - b2**averaged) if corrects else (1.0, 1.0)
        rates += LR / first if late else 0.0
        joins = late and t % local == 0
        for n, g in gradients(t).items():
            m[n] = b1 * m[n] + (1 - b1) * g.double()
            if averages:
                v[n] = b2 * v[n] + (1 - b2) * g.double().square()
            below = (v[n] / second).sqrt() + EPS
            change = LR * (m[n] / first / below + DECAY * x[n])
            x[n] = x[n] - change
            if late:
                moved[n] = moved[n] + change
            if joins:
                m[n], moved[n] = moved[n] * below / rates, torch.zeros_like(moved[n])
        if joins:
            rates = 0.0
        if averages:
            counter += 1
            if counter == ZERO_ONE["var_update_scaler"]:
                interval, counter = 2 * interval, 0
        if late:
            local_counter += 1
            if local_counter == ZERO_ONE["local_step_scaler"]:
                local, local_counter = min(ZERO_ONE["local_step_clipper"], 2 * local), 0
    return x


def lamb(corrects: bool) -> Values:
    (b1, b2), (x, m, v) = BETAS, begin()
    coefficient, last, fresh = dict.fromkeys(x, 0.0), dict.fromkeys(x, 1.0), dict(v)
    for t in range(1, STEPS + 1):
        rate = LR * (math.sqrt(1 - b2 ** min(t, FREEZE)) / (1 - b1**t) if corrects else 1.0)
        for n, g in gradients(t).items():
            before, m[n] = m[n], b1 * m[n] + (1 - b1) * g.double()
            if t <= FREEZE:
                v[n] = fresh[n] = b2 * v[n] + (1 - b2) * g.double().square()
                update = m[n] / (v[n].sqrt() + EPS) + DECAY * x[n]
                ratio = min(max(norm(x[n]) / norm(update), 0.01), 10.0)
                coefficient[n] = 0.9 * coefficient[n] + 0.1 * ratio
            else:
                rebuilt = (m[n] - b1 * before) / (1 - b1)
                fresh[n] = b2 * fresh[n] + (1 - b2) * rebuilt.square()
                below = v[n].sqrt() + EPS
                plain = m[n] / below
                update = plain + DECAY * x[n]
                share = min(1.0, norm(plain) / norm(update))
                factor = float((below / (fresh[n].sqrt() + EPS)).max()) * share + 1 - share
                factor = min(max(factor, 0.5), 4.0)
                last[n] = min(max(factor, 0.9 * last[n]), 1.1 * last[n])
                ratio = coefficient[n] * last[n]
            x[n] = x[n] - rate * ratio * update
    return x


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(
    ("name", "formula", "options"),
    [
        ("onebit_adam", adam, {"freeze_step": FREEZE}),
        ("zero_one_adam", zero_one_adam, ZERO_ONE),
        ("onebit_lamb", lamb, {"freeze_step": FREEZE}),
    ],
)
def test_one_rank_follows_the_formula(
    world_of_one: None, name: str, formula: Callable[[bool], Values], options: dict[str, Any], corrects: bool
) -> None:
    model = Linear()
    common: dict[str, Any] = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "stage": 0}
    opt = zcomm.ZeroOptimizer(model, name, bias_correction=corrects, **common, **options)
    for step in range(1, STEPS + 1):
        opt.backward(model(gradients(step)))
        opt.step()
        opt.zero_grad()
    for key, wanted in formula(corrects).items():
        torch.testing.assert_close(zcomm.zero.full_param(getattr(model, key)).double(), wanted, rtol=2e-5, atol=2e-6)
    opt.close()
