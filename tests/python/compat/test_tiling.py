"""``TiledLinear``: the numbers of one layer, on its own and sharded in stage 3."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.compat.deepspeed import zero
from zcomm.compat.deepspeed.runtime.zero.tiling import TiledLinear, TiledLinearReturnBias


class Pair(nn.Linear):
    """A layer that returns its bias, and does not add it."""

    def forward(self, input: torch.Tensor) -> Any:
        return nn.functional.linear(input, self.weight), self.bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("ins", "outs"), [(1, 1), (2, 3), (5, 4), (23, 29)])
def test_numbers_are_those_of_one_layer(ins: int, outs: int, bias: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(23, 29, bias=bias, dtype=torch.float64)
    tiled = TiledLinear(23, 29, bias, ins, outs, init_linear=base, dtype=torch.float64)
    assert [linear.bias is not None for row in tiled.linears for linear in row] == ([False] * (ins - 1) + [bias]) * outs
    x = torch.randn(4, 23, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    out = tiled(x)
    torch.testing.assert_close(out, base(y))
    out.square().sum().backward()
    base(y).square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    for number, row in enumerate(tiled.linears):
        rows = slice(tiled.out_parts[number], tiled.out_parts[number + 1])
        for column, linear in enumerate(row):
            columns = slice(tiled.in_parts[column], tiled.in_parts[column + 1])
            torch.testing.assert_close(linear.weight.grad, base.weight.grad[rows, columns])
            if linear.bias is not None:
                torch.testing.assert_close(linear.bias.grad, base.bias.grad[rows])
    given = TiledLinear(23, 29, bias, ins, outs, True, False, init_linear=base, dtype=torch.float64)
    parts = given(x.split([after - before for before, after in itertools.pairwise(tiled.in_parts)], dim=-1))
    assert len(parts) == outs and torch.equal(torch.cat(parts, -1), out)
    with pytest.raises(ValueError, match=f"{ins + 1} parts of the input, and in_splits={ins}"):
        given([x] * (ins + 1))


def test_a_bias_is_returned() -> None:
    base = Pair(8, 6)
    out, bias = TiledLinearReturnBias(8, 6, linear_cls=Pair, in_splits=2, out_splits=3, init_linear=base)(torch.ones(8))
    torch.testing.assert_close(out, base(torch.ones(8))[0])
    assert torch.equal(bias, base.bias)
    plain = TiledLinearReturnBias(8, 6, False, linear_cls=Pair, in_splits=2, out_splits=3)
    assert plain(torch.ones(8))[1] is None and zero.TiledLinear is TiledLinear


def test_sizes_that_do_not_fit() -> None:
    for sizes in ({"in_splits": 0}, {"out_splits": 7}):
        with pytest.raises(RuntimeError, match="must be from 1 to"):
            TiledLinear(6, 6, **sizes)
    for other in (nn.Linear(6, 5), nn.Linear(6, 6, bias=False)):
        with pytest.raises(ValueError, match=r"expected \(6, 6\) and True"):
            TiledLinear(6, 6, init_linear=other)


def _train(stage: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    comm = zcomm.init()
    model = nn.Sequential(TiledLinear(12, 10, in_splits=2, out_splits=2), nn.Tanh(), nn.Linear(10, 1))
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.1, stage=stage, share_parameters=stage == 0)
    torch.manual_seed(1)
    model[0].copy_params_from(nn.Linear(12, 10))
    for step in range(3):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    found = list(opt.full_state_dict().values())
    opt.close()
    return found


def test_stage_3_has_the_bits_of_stage_0(run_ranks: Any) -> None:
    """The layer is filled after it was sharded."""
    plain, sharded = run_ranks(_train, 2, 0), run_ranks(_train, 2, 3)
    for found in sharded:
        assert all(map(torch.equal, found, plain[0]))
