"""One element of a sharded weight or gradient as a number: in text, in conditions, as an index."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import zcomm

VALUE = 2.5
USES: dict[str, Callable[[torch.Tensor], object]] = {
    "format": lambda t: (f"{t:.3f}", f"{t}", f"{t:>8.1f}"),
    "%": lambda t: ("%.2f" % t, "%d" % t),  # noqa: UP031
    "number": lambda t: (float(t), int(t), bool(t), complex(t)),
    "round": lambda t: (round(t.item(), 1), math.floor(t), math.ceil(t)),
    "math": lambda t: (math.sqrt(t), math.isfinite(t), float(abs(t)), float(2**t)),
    "condition": lambda t: (bool(t > 1 and t < 3), float(max(t, 1)), sum([t.detach(), t.detach()]).item()),
    "index": lambda t: ([4, 5, 6][t.detach().long()], operator.index(t.detach().long()), len(range(t.detach().int()))),
    "array": lambda t: (t.tolist(), t.detach().numpy().item(), numpy.asarray(t.detach()).item()),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(VALUE))
        self.check: Callable[[torch.Tensor], None] = lambda scalar: None
        nn.init.constant_(self.line.weight, VALUE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check(self.line.weight.data[0, 0])  # of another unit: gathered
        self.check(self.scale.data)  # in use
        return self.line(x) * self.scale


@pytest.fixture
def net() -> Iterator[Net]:
    importlib.import_module("zcomm.compat.deepspeed.runtime.zero.partition_parameters")  # ds_tensor
    model = Net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False, units=["line"])
    yield model
    opt.close()
    zcomm.shutdown()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_as_of_a_tensor(net: Net) -> None:
    seen: list[str] = []

    def check(scalar: Any) -> None:
        seen.append(type(scalar).__name__)
        for name, use in USES.items():
            assert use(scalar) == use(torch.tensor(VALUE)), (seen[-1], name)

    weight = net.line.weight
    for scalar in (
        weight[0, 0],
        weight.data[0, 0],
        weight.detach()[1, 1],
        net.scale.data,
        net.line.weight.ds_tensor[3],
    ):
        check(scalar)
    net.check = check
    net(torch.ones(2, 8)).sum().backward()
    with torch.no_grad():
        weight.grad.fill_(VALUE)
        net.scale.grad.fill_(VALUE)
    check(weight.grad[0, 0])
    check(net.scale.grad)
    assert {"WholeValue", "ShardedData", "ValueInUse", "GradStandIn", "_Copy"} <= set(seen)
    for several in (weight[0], weight.grad[0], weight.ds_tensor):
        with pytest.raises(TypeError, match=r"__format__"):
            f"{several:.3f}"
