"""Parameters of zero.Init before ZeroOptimizer: rank 0's values, copies, and errors where there is no value."""

from __future__ import annotations

import contextlib
import copy
import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import GatheredParameters, Init
from zcomm.zero.agree import from_root

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """Parameters without memory (of recipes that are cut or not), small ones, and one that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.truncated = nn.Linear(12, 12), nn.Linear(12, 12)
        nn.init.trunc_normal_(self.truncated.weight, std=0.5)
        self.computed = nn.Parameter(torch.randn(12, 12) @ torch.randn(12, 12))
        self.copied = nn.Linear(12, 12)
        with torch.no_grad():
            self.copied.weight.copy_(self.line.weight)
            self.copied.weight[3] = torch.randn(12)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def seeds_by_rank() -> dict[str, torch.Tensor]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(comm.rank)
    with Init(min_count=64):
        model = Net()
    assert model.line.weight.is_meta and model.truncated.weight.is_meta and not model.computed.is_meta
    with GatheredParameters(model.parameters(), modifier_rank=0):
        late = values_of(model) if comm.rank == 1 else {}
    with GatheredParameters(model):
        seen, inside = values_of(model), copy.deepcopy(model)
    assert comm.rank == 0 or same(late, seen)
    for modifier in (0, 1):  # small ones, too
        with GatheredParameters([model.line.bias, model.computed], modifier_rank=modifier), torch.no_grad():
            model.line.bias.fill_(comm.rank)
            model.computed.mul_(1 + comm.rank)
            with GatheredParameters(model.line.bias):
                assert float(model.line.bias.mean()) == comm.rank, "a context inside leaves the values alone"
        assert bool((model.line.bias == modifier).all())
    changed = {**seen, "line.bias": torch.ones(12), "computed": 2 * seen["computed"]}
    for twin, want in ((model, changed), (inside, seen)):
        opt = zcomm.ZeroOptimizer(twin, "sgd", lr=0.1, stage=3, share_parameters=False)
        assert same(dict(opt.full_state_dict()), want)
        opt.close()
    return seen


def test_values_are_those_of_rank_0(run_ranks: Run) -> None:
    torch.manual_seed(0)
    want = values_of(Net())
    for seen in run_ranks(seeds_by_rank, 2):
        assert same(seen, want)


ERRORS: list[tuple[Exception, type[Exception], str]] = [
    (ValueError("the value"), ValueError, "reading it failed on rank 1: the value"),
    (OSError(errno.ENOSPC, "the drive"), OSError, r"\[Errno 28\] reading it failed on rank 1: \[Errno 28\] the drive"),
    (RuntimeError("the cause"), OSError, r"\[Errno 5\] reading it failed on rank 1: RuntimeError: the cause"),
]


def fail_at_root() -> None:
    comm = zcomm.init(timeout=60)
    assert from_root(comm, 1, "reading it", lambda: comm.rank) == (1 if comm.rank == 1 else None)
    for error, kind, text in ERRORS:
        with pytest.raises(type(error) if comm.rank == 1 else kind, match=None if comm.rank == 1 else text):
            from_root(comm, 1, "reading it", partial(_raise, error))
    model = nn.Sequential(nn.Linear(8, 8))
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False)
    for rank in range(2):
        wrong = pytest.raises(ValueError, match=r"0\.weight has shape \(2, 8\) now, not \(8, 8\)")
        with wrong if rank == 1 else contextlib.nullcontext(), GatheredParameters(model, modifier_rank=1):
            if comm.rank == rank:
                model[0].weight.data = torch.zeros(2, 8)
    opt.close()


def _raise(error: Exception) -> None:
    raise error


def test_errors_of_one_rank_reach_the_others_with_their_text(run_ranks: Run) -> None:
    run_ranks(fail_at_root, 2)
