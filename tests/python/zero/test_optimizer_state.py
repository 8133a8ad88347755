"""State of a ZeroOptimizer that a program reads, replaces or forgets: torch's numbers, or an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm


@pytest.fixture(autouse=True, scope="module")
def job() -> Iterator[None]:
    zcomm.init()
    yield
    zcomm.shutdown()


def made(optimizer: Any = "adam", **options: Any) -> tuple[nn.ParameterList, Any]:
    model = nn.ParameterList([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))])
    kind = zcomm.ZeroOptimizer if options.pop("zero", True) else lambda model, kind, **o: kind(model.parameters(), **o)
    return model, kind(model, optimizer, **{"lr": 0.125, **options})


def step(model: nn.ParameterList, opt: Any, factor: float) -> None:
    opt.zero_grad()
    sum((param * factor).sum() for param in model).backward()
    opt.step()


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "nadam": (torch.optim.NAdam, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("forgotten", [(0, 1), (0,), (1,)], ids=["all", "first", "last"])
def test_a_state_dict_that_lacks_entries_begins_them_again(name: str, forgotten: tuple[int, ...]) -> None:
    kind, options = OPTIMIZERS[name]
    ends = []
    for zero in (False, True):
        model, opt = made(kind, zero=zero, **options)
        for factor in (1.0, -3.0):
            step(model, opt, factor)
        saved = opt.state_dict()
        opt.load_state_dict(saved | {"state": {n: e for n, e in saved["state"].items() if n not in forgotten}})
        for factor in (-3.0, 2.0, 0.5):
            step(model, opt, factor)
        ends.append([zcomm.zero.full_param(p) if zero else p.detach() for p in model])
        if zero:
            opt.close()
    for wanted, found in zip(*ends, strict=True):
        torch.testing.assert_close(found, wanted)


def test_an_accumulator_that_a_state_dict_lacks_has_its_initial_value() -> None:
    model, opt = made("adagrad", initial_accumulator_value=0.5)
    step(model, opt, 1.0)
    opt.load_state_dict(opt.state_dict() | {"state": {}})
    assert torch.equal(zcomm.zero.full_optim_state(model[1], "sum"), torch.full((5,), 0.5))
    opt.close()
