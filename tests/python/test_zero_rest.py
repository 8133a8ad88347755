"""What of a model nobody shards: buffers and whole frozen parameters. Their dtypes, checkpoints and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


class Sized(nn.Module):
    def __init__(self, width: int, table: int, gain: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(gain), requires_grad=False)
        self.register_buffer("table", torch.zeros(table))


def load_other_shapes(folder: str) -> list[str]:
    zcomm.init(timeout=60)
    saved = Sized(4, 1, 4)
    opt = zcomm.ZeroOptimizer(saved, "sgd", stage=1)
    opt.save(f"{folder}/c")
    opt.close()
    said = []
    for shapes, strict in (((4, 7, 4), False), ((4, 1, 5), False), ((4, 1, 5), True)):
        model = Sized(*shapes)
        nn.init.zeros_(model.layer.weight)
        opt = zcomm.ZeroOptimizer(model, "sgd", stage=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="other shapes") as told:
            opt.load(f"{folder}/c", strict=strict)
        said.append(str(told.value).partition("other shapes: ")[2])
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{name}: nothing has changed"
        opt.close()
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_shapes_are_compared_before_anything_changes(run_ranks: Run, tmp_path: Any, world_size: int) -> None:
    for said in run_ranks(load_other_shapes, world_size, str(tmp_path)):
        assert said[0].startswith("table: (1,) there, (7,) here"), "one element is no value for all"
        assert said[1].startswith("gain: (4,) there, (5,) here") and said[2].startswith("gain: (4,) there, (5,) here")
