"""Buckets are launched in the order of their gradients: few of these wait, whatever order the model registers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import slow
from zcomm.zero.gradients.launch_order import order_of
from zero_jobs import digest

Run = Callable[..., list[Any]]
WIDTH, LAYERS, EXPERTS = 48, 8, 5
LAYER_NBYTES = WIDTH * WIDTH * 4
BUCKET_MB = LAYER_NBYTES / 2**20  # one layer each


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ([3, 2, 1, 0], [3, 2, 1, 0]),
        ([0, 3, 2, 1], [0, 3, 2, 1]),
        ([0, 3, 1], [0, 3, 2, 1]),  # 2 has no gradient
        ([], [3, 2, 1, 0]),
        ([1], [3, 2, 1, 0]),
        ([0, 2], [3, 0, 2, 1]),
    ],
)
def test_buckets_without_gradients_stay_beside_their_neighbours(arrivals: list[int], order: list[int]) -> None:
    assert order_of(arrivals, 4) == order


class Backwards(nn.Module):
    """Layers that are used last to first: the launch order of the first pass is the worst one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Experts(nn.Module):
    """Layers, and behind every second one an expert of several: which, depends on the step and the rank.

    reentrant: experts run inside of a reentrant checkpoint. Its backward is a pass of its own.
    """

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        made = ([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)] for _ in range(LAYERS // 2))
        self.experts = nn.ModuleList(map(nn.ModuleList, made))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if number % 2:
                group: Any = self.experts[number // 2]
                expert = group[(step * (number + 1)) % EXPERTS]
                x = x + (checkpoint(expert, x, use_reentrant=True) if self.reentrant else expert(x))
        return x


class Held:
    """Counts the bytes of gradients that wait for a slot."""

    def __init__(self, opt: zcomm.ZeroOptimizer) -> None:
        reducer: Any = opt._live.reducer
        self.nbytes, plain = 0, reducer._arrived

        def arrived(index: int, grad: torch.Tensor | None) -> None:
            plain(index, grad)
            self.nbytes = max(self.nbytes, sum(grad.nbytes for grad in reducer._early.values()))

        reducer._arrived = arrived

    def take(self) -> int:
        found, self.nbytes = self.nbytes, 0
        return found


def run(make: Callable[[], nn.Module], steps: int, accum: int = 1, **options: Any) -> tuple[str, list[int]]:
    """Return the bits of the weights after ``steps``, and the most bytes that waited in each pass."""
    comm = zcomm.init(timeout=60)
    model = make()
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, grad_accum=accum, **options)
    held, found = Held(opt), []
    for number in range(steps * accum):
        torch.manual_seed(10 * number + comm.rank)
        model(torch.randn(4, WIDTH), number + comm.rank).square().sum().backward()
        found.append(held.take())
        opt.step()
        opt.zero_grad()
    bits = digest(opt.full_state_dict())
    opt.close()
    return bits, found


def backwards() -> list[tuple[str, list[int]]]:
    options: list[dict[str, Any]] = [
        {"stage": 2, "bucket_mb": BUCKET_MB},
        {"stage": 2, "bucket_mb": BUCKET_MB, "overlap": False},
        {"stage": 3, "bucket_mb": 2 * BUCKET_MB},
        {"stage": 0},
    ]
    return [run(Backwards, 3, 2, **each) for each in options]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_gradient_waits_for_the_end_of_backward(run_ranks: Run, world_size: int) -> None:
    for found in run_ranks(backwards, world_size):
        (bits, held), (late, _), (coarse, _), (whole, _) = found
        assert held[0] >= (LAYERS - 4) * LAYER_NBYTES, "the first pass does not know the order"
        assert max(held[1:]) == 0
        assert bits == late == coarse == whole


def experts(reentrant: bool) -> list[tuple[str, list[int]]]:
    def make() -> nn.Module:
        return Experts(reentrant)

    options: list[dict[str, Any]] = [
        {"stage": 2, "bucket_mb": BUCKET_MB},
        {"stage": 2, "bucket_mb": BUCKET_MB, "overlap": False},
        {"stage": 1, "bucket_mb": 3 * BUCKET_MB},
        {"stage": 0},
    ]
    return [run(make, 12, **each) for each in options]


@pytest.mark.parametrize("world_size", [slow(1), 2, slow(3)])
def test_experts_without_tokens_hold_up_nothing(run_ranks: Run, world_size: int) -> None:
    for found in run_ranks(experts, world_size, False):
        (bits, held), (late, _), (coarse, _), (whole, _) = found
        assert max(held[:2]) >= 2 * LAYER_NBYTES
        # Each has been used, and been without tokens: only the order of a later pass differs from that of the first.
        assert max(held[EXPERTS + 1 :]) <= 2 * LAYER_NBYTES
        assert bits == late == coarse == whole


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_reentrant_checkpoints_reach_is_waited_for(run_ranks: Run, world_size: int) -> None:
    for found in run_ranks(experts, world_size, True):
        bits = {each for each, _ in found}
        assert len(bits) == 1


def dropped(overlap: bool) -> str:
    """Train with a layer that the program leaves out of every second pass, and drop its gradient."""
    zcomm.init(timeout=60)
    model = Experts()
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, stage=2, bucket_mb=BUCKET_MB, overlap=overlap, grad_accum=2)
    for number in range(16):
        torch.manual_seed(number)
        model(torch.randn(4, WIDTH), number).square().sum().backward()
        for param in model.experts[1].parameters():
            if number % 3 == 2:
                param.grad = None
        opt.step()
        opt.zero_grad()
    bits = digest(opt.full_state_dict())
    opt.close()
    return bits


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dropped_gradient_of_an_absent_parameter(run_ranks: Run, world_size: int) -> None:
    assert len({*run_ranks(dropped, world_size, True), *run_ranks(dropped, world_size, False)}) == 1


def failing() -> tuple[str, str]:
    """Train, with a first pass that fails half way."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise ArithmeticError("in backward")

    def train(fails: bool) -> str:
        model = Backwards()
        opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, stage=2, bucket_mb=BUCKET_MB)
        if fails:
            x = model.layers[LAYERS - 1](torch.ones(4, WIDTH))
            for number, layer in enumerate(model.layers):
                x = Fails.apply(layer(x)) if number == 1 else layer(x)
            with pytest.raises(ArithmeticError):
                x.sum().backward()
            opt.zero_grad()
        for step in range(3):
            torch.manual_seed(step)
            model(torch.randn(4, WIDTH), step).square().sum().backward()
            opt.step()
            opt.zero_grad()
        bits = digest(opt.full_state_dict())
        opt.close()
        return bits

    zcomm.init(timeout=60)
    return train(True), train(False)


def test_a_first_pass_that_failed_is_not_the_order() -> None:
    with_failure, without = failing()
    zcomm.shutdown()
    assert with_failure == without


def taken(folder: str) -> list[tuple[list[int], list[int]]]:
    """Return the buckets in the order of their launches, and in that in which updates take their sums, by step."""
    zcomm.init(timeout=60)
    net = Backwards()
    offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward")
    opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.1, stage=3, offload=offload, nvme_path=folder, bucket_mb=BUCKET_MB)
    parts: Any = opt._parts
    source, found = parts.store.source, []
    load, order = source.load, list[int]()
    source.load = lambda bucket: (order.append(bucket.index), load(bucket))[1]
    for step in range(8):
        order.clear()
        net(torch.ones(2, WIDTH), step).square().sum().backward()
        opt.step()
        opt.zero_grad()
        found.append(([bucket.index for bucket in parts.reducer.order], list(order)))
    opt.close()
    return found[3:]  # two are watched; the third one's forward updates, too


@pytest.mark.parametrize("world_size", [1, 2])
def test_sums_on_a_drive_leave_in_the_order_of_launches(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(taken, world_size, str(tmp_path)):
        assert all(launched == updated and len(launched) >= LAYERS for launched, updated in found), found
