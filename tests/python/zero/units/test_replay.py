"""First values by pieces: the bits of an ordinary construction, and the same state of the generator after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero.materialize import deferred, recipe, replay

Start = Callable[[torch.Tensor], object]


def half_drawn(weight: torch.Tensor) -> None:
    weight.zero_()
    weight[: weight.shape[0] // 2].normal_()


def padded(weight: torch.Tensor) -> None:
    weight.normal_(std=0.5)
    weight[1].fill_(0)
    weight.mul_(0.3)


STARTS: dict[str, tuple[Start, bool]] = {  # and whether it can be drawn by pieces
    "normal": (lambda w: w.normal_(0.1, 0.02), True),
    "uniform": (lambda w: w.uniform_(-0.3, 0.7), True),
    "kaiming": (lambda w: nn.init.kaiming_uniform_(w, a=5**0.5), True),
    "xavier": (nn.init.xavier_normal_, True),
    "constant": (lambda w: w.fill_(0.25), True),
    "nothing": (lambda w: w.zero_(), True),
    "twice": (lambda w: w.normal_().fill_(2.0), True),
    "a transposed view": (lambda w: w.t().normal_(), False),
    "a half": (half_drawn, False),
    "truncated": (lambda w: nn.init.trunc_normal_(w, std=0.1), False),
    "clamped": (lambda w: w.normal_().clamp_(-1, 1), False),
}


def read_by(read: Callable[[int, int], torch.Tensor], count: int, step: int) -> torch.Tensor:
    return torch.cat([read(begin, min(begin + step, count)).clone() for begin in range(0, count, step)])


@pytest.mark.parametrize("name", [*STARTS, "padded"])
def test_pieces_have_the_bits_of_one_draw(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, by_pieces = STARTS.get(name, (padded, None))
    monkeypatch.setattr(replay, "PIECE_COUNT", 64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for shape in ((2, 3), (4, 4), (8, 8), (5, 13), (9, 9), (16, 13), (64, 8), (31, 17)):
            torch.manual_seed(5)
            with torch.no_grad():
                plain = torch.empty(shape, dtype=dtype)
                start(plain)
            after = torch.rand(3)
            torch.manual_seed(5)
            with zcomm.zero.Init(min_count=1):
                module = nn.Module()
                module.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
                with torch.no_grad():
                    start(module.weight)
            assert torch.equal(after, torch.rand(3)), f"{dtype} {shape}: the generator goes on elsewhere"
            waiting = deferred.check(module.weight, "weight")
            assert by_pieces is None or (recipe.by_pieces(waiting) is not None) == by_pieces
            for step in (plain.numel(), 48, 7):
                value = read_by(deferred.reader_of(module.weight, "weight"), plain.numel(), step)
                assert torch.equal(value.view(shape), plain), f"{dtype} {shape} by {step}"


def test_a_draw_that_is_not_the_same_by_pieces_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that fills memory in another order gives the same bits, too."""
    monkeypatch.setattr(replay, "PIECE_COUNT", 64)
    original = torch.ops.aten.normal_.default
    calls: list[int] = []

    def draws(func: object, dtype: torch.dtype) -> bool:
        calls.append(1)
        return False

    monkeypatch.setattr(replay, "draws_by_pieces", draws)
    torch.manual_seed(5)
    plain = torch.empty(20, 20).normal_()
    after = torch.rand(3)
    torch.manual_seed(5)
    with zcomm.zero.Init(min_count=1):
        module = nn.Module()
        module.weight = nn.Parameter(torch.empty(20, 20).normal_())
    assert torch.equal(after, torch.rand(3)) and calls
    assert recipe.by_pieces(deferred.check(module.weight, "weight")) is None
    assert torch.equal(deferred.reader_of(module.weight, "weight")(0, 400).view(20, 20), plain)
    monkeypatch.undo()
    assert replay.draws_by_pieces(original, torch.float32)
    assert not replay.draws_by_pieces(torch.ops.aten.exponential_.default, torch.float32)


def test_parameters_of_one_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one begins in the middle of a draw."""
    monkeypatch.setattr(replay, "PIECE_COUNT", 64)
    torch.manual_seed(5)
    plain = torch.empty(20, 20).normal_()
    torch.manual_seed(5)
    with zcomm.zero.Init(min_count=1):
        whole = torch.empty(20, 20).normal_()
        module = nn.ParameterList([nn.Parameter(whole[:9]), nn.Parameter(whole[9:])])
    values = [read_by(deferred.reader_of(each, "weight"), each.numel(), 50) for each in module]
    assert torch.equal(torch.cat(values).view(20, 20), plain)
