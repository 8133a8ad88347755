"""Gradients that are reduced from where autograd put them: the same bits, nothing copied, nothing kept too long."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import long
from zero_jobs import batch, digest, loss_of, small_gpt

Run = Callable[..., list[Any]]


def bits(stage: int, precision: str, bucket_mb: float, own: bool) -> tuple[str, int]:
    """Return the bits of the weights after some steps, and how many gradients were kept."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=stage, precision=precision, bucket_mb=bucket_mb, grad_accum=2)
    transport, kept = opt._live.reducer.accumulators.transports[0], 0
    assert transport.keeps, "ranks of one host"
    plain = transport._own.keep

    def keep(*given: Any) -> bool:
        nonlocal kept
        done = plain(*given)
        kept += done
        return done

    transport._own.keep = keep if own else lambda *given: False  # type: ignore[method-assign]
    for step in range(6):
        loss_of(model, *batch(comm.rank, step)).backward()
        opt.step()
        opt.zero_grad()
    found = digest(opt.full_state_dict())
    opt.close()
    return found, kept


def all_bits() -> list[tuple[Any, ...]]:
    found = []
    for stage, precision, bucket_mb in [(0, "fp32", 1.0), (1, "fp32", 0.02), (2, "bf16", 1.0), (3, "fp32", 0.02)]:
        with_own, kept = bits(stage, precision, bucket_mb, own=True)
        without, none = bits(stage, precision, bucket_mb, own=False)
        found.append(((stage, precision, bucket_mb), with_own == without, kept, none))
    return found


@pytest.mark.parametrize("world_size", [1, 2, long(3)])
def test_bits_are_those_of_copies(run_ranks: Run, world_size: int) -> None:
    ranks = run_ranks(all_bits, world_size)
    for found in ranks:
        for case, same, _, none in found:
            assert same and none == 0, case
    for case, *kept in zip(*([(row[0], row[2]) for row in found] for found in ranks), strict=True):
        assert any(count for _, count in (case, *kept)), case


class Wide(nn.Module):
    """Two matrices of equal size: of two ranks each owns one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


class LateError(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in the middle of backward")


def watched(model: Wide) -> list[Any]:
    """Weak references to the gradients of later passes."""
    seen: list[Any] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
    return seen


def life_of_gradients() -> None:
    comm = zcomm.init(timeout=60)
    model = Wide()
    seen = watched(model)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2, overlap=False)
    (transport,) = opt._live.reducer.accumulators.kinds
    x = torch.ones(2, 64)
    model(x).sum().backward()
    (bucket,) = opt._live.geometry.buckets
    slot = transport.slot(bucket)
    for rank in range(2):
        copied = bool(slot[bucket.shard(rank)].any())
        assert copied == (rank != comm.rank), f"rank {comm.rank} copies for rank {rank}"
    opt.step()
    opt.zero_grad()
    assert [ref() for ref in seen] == [None, None], "reduced gradients are free"

    seen.clear()
    with pytest.raises(ArithmeticError):
        model.second(LateError.apply(model.first(x))).sum().backward()
    assert len(seen) == 1, "the second layer's gradient came"
    opt.zero_grad()
    assert seen[0]() is None, "forgotten with the pass that failed"
    before = {name: value.clone() for name, value in opt.full_state_dict().items()}
    model(x).sum().backward()
    grads = {name: zcomm.zero.full_grad(param).clone() for name, param in model.named_parameters()}
    opt.step()
    for name, value in opt.full_state_dict().items():
        assert torch.equal(value, before[name] - 0.1 * grads[name]), name
    opt.close()


def test_nothing_is_copied_for_oneself_and_nothing_stays(run_ranks: Run) -> None:
    run_ranks(life_of_gradients, 2)


def plain_or_not() -> list[bool]:
    """Return which of one-parameter optimizers' gradients are kept, all of which are right."""
    zcomm.init(timeout=60)
    expert, one = torch.arange(4096.0), torch.tensor([2.0])
    buffer = torch.ones(64, 64)

    def written_later(p: torch.Tensor) -> None:
        p.view(64, 64).backward(buffer)
        buffer.zero_()  # as a program does that receives the next one there

    cases: list[tuple[torch.Tensor, Callable[[torch.Tensor], Any], torch.Tensor]] = [
        (expert, lambda p: (p * expert).sum().backward(), expert),
        (expert, written_later, torch.ones(4096)),
        (expert, lambda p: (torch.stack([p, torch.ones(4096)]) * expert).sum().backward(), expert),
        (expert, lambda p: p.sum().backward(), torch.ones(4096)),  # one number, spread
        (expert, lambda p: torch.sgn(p).sum().backward(), torch.zeros(4096)),  # no memory at all
        # negated when it is read
        (one, lambda p: (torch.complex(one, p).conj() * (3 + 4j)).real.sum().backward(), torch.tensor([4.0])),
    ]
    found = []
    for value, backward, gradient in cases:
        param = nn.Parameter(value.clone())
        opt = zcomm.ZeroOptimizer([param], "sgd", lr=1.0, stage=1)
        own = opt._live.reducer.accumulators.transports[0]._own
        assert own is not None
        kept: list[bool] = []
        keep = own.keep
        own.keep = lambda *given: kept.append(keep(*given)) or kept[-1]  # type: ignore[method-assign,func-returns-value]  # noqa: B023
        backward(param)
        assert torch.equal(zcomm.zero.full_grad(param), gradient), (len(found), kept)
        found.append(kept == [True])
        opt.close()
    return found


def test_only_plain_gradients_of_their_own_are_kept(run_ranks: Run) -> None:
    (found,) = run_ranks(plain_or_not, 1)
    assert found == [True, False, False, True, False, False], found


def odd_gradients(dtype: str | None) -> list[bool]:
    """Return which of gradients of several forms are kept; all sums are right."""
    comm = zcomm.init(timeout=60)
    plain = nn.Parameter(torch.ones(8, 16))
    turned = nn.Parameter(torch.ones(16, 8).t())
    table = nn.Embedding(16, 8, sparse=True)
    params = [plain, turned, table.weight]
    opt = zcomm.ZeroOptimizer(params, "sgd", lr=1.0, stage=1, communication_dtype=dtype)
    own = opt._live.reducer.accumulators.transports[0]._own
    assert own is not None
    kept: list[bool] = []
    keep = own.keep
    own.keep = lambda *given: kept.append(keep(*given)) or kept[-1]  # type: ignore[method-assign,func-returns-value]
    scale = comm.rank + 1.0
    weights = torch.arange(128.0).view(8, 16) * scale
    loss = (plain * weights).sum() + (turned * weights).sum() + table(torch.arange(8)).sum() * scale
    loss.backward()
    average = sum(range(1, comm.world_size + 1)) / comm.world_size
    sums = [zcomm.zero.full_grad(param) for param in params]
    assert torch.equal(sums[0], torch.arange(128.0).view(8, 16) * average) and torch.equal(sums[1], sums[0])
    assert torch.equal(sums[2], torch.full((16, 8), average) * (torch.arange(16) < 8).float()[:, None])
    opt.close()
    return kept


def test_gradients_that_do_not_fit_are_copied(run_ranks: Run) -> None:
    assert run_ranks(odd_gradients, 1, None) == [[True, True, True]]
    assert run_ranks(odd_gradients, 1, "bf16") == [[False, False, False]], "slots have another dtype"
    run_ranks(odd_gradients, 3, None)


def alive_in_backward() -> list[int]:
    """Count the earlier gradients that live when autograd has computed each one, with a bucket for each."""
    zcomm.init(timeout=60)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers)
    alive: list[weakref.ref[torch.Tensor]] = []
    counts: list[int] = []
    for layer in layers:
        layer.weight.register_post_accumulate_grad_hook(lambda p: alive.append(weakref.ref(p.grad)))
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=2, bucket_mb=64 * 64 * 4 / 2**20)
    (transport,) = opt._live.reducer.accumulators.kinds
    assert len(transport.buckets) == 8

    def count(_: torch.Tensor) -> None:
        counts.append(sum(gradient() is not None for gradient in alive))
        while not all(work is None or work.done() for work in transport._works):
            time.sleep(0.001)

    for layer in layers:
        layer.weight.register_hook(count)
    model(torch.ones(4, 64)).sum().backward()
    opt.close()
    return counts


@pytest.mark.parametrize("world_size", [1, 2])
def test_kept_gradients_live_until_they_are_reduced(run_ranks: Run, world_size: int) -> None:
    """Not until their slot is needed: autograd's next gradients take their memory."""
    for counts in run_ranks(alive_in_backward, world_size):
        assert counts == [0] + [1] * 7
