"""Parameters of zero.Init before ZeroOptimizer: rank 0's values, copies, and errors for missing values."""

from __future__ import annotations

import contextlib
import copy
import errno
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import zcomm
from zcomm.zero import GatheredParameters, Init
from zcomm.zero.agree import from_root

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """Deferred parameters (with recipes that can be cut, or not), small ones, and a computed one."""

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
    outside = copy.deepcopy(model)
    with GatheredParameters(model.parameters(), modifier_rank=0):
        late = values_of(model) if comm.rank == 1 else {}
    with GatheredParameters(model):
        seen, inside = values_of(model), copy.deepcopy(model)
    assert comm.rank == 0 or same(late, seen)
    for modifier in (0, 1):  # also small ones
        with GatheredParameters([model.line.bias, model.computed], modifier_rank=modifier), torch.no_grad():
            model.line.bias.fill_(comm.rank)
            model.computed.mul_(1 + comm.rank)
            with GatheredParameters(model.line.bias):
                assert float(model.line.bias.mean()) == comm.rank, "a context inside leaves the values alone"
        assert bool((model.line.bias == modifier).all())
    changed = {**seen, "line.bias": torch.ones(12), "computed": 2 * seen["computed"]}
    for twin, want in ((model, changed), (outside, seen), (inside, seen)):
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


def lone() -> nn.Linear:
    with Init(min_count=64):
        return nn.Linear(12, 12)


X = torch.ones(12, 12)
USES: dict[str, Callable[[nn.Linear], object]] = {
    "item": lambda m: m.weight[0, 0].item(),
    "float": lambda m: float(m.weight.detach()[0, 0]),
    "bool": lambda m: bool((m.weight == 2).all()),
    "format": lambda m: f"{m.weight[0, 0]:.3f}",
    "tolist": lambda m: m.weight.tolist(),
    "numpy": lambda m: m.weight.detach().numpy(),
    "cpu": lambda m: m.weight.cpu().sum().item(),
    "data.cpu": lambda m: m.weight.data.cpu().float().tolist(),
    "data_ptr": lambda m: m.weight.data_ptr(),
    "copy_": lambda m: torch.zeros(12, 12).copy_(m.weight),
    "equal": lambda m: torch.equal(m.weight, X),
    "==": lambda m: m.weight == X,
    "allclose": lambda m: torch.allclose(m.weight.data, X),
    "index": lambda m: X[m.weight.data > 0],
    "nonzero": lambda m: m.weight.nonzero(),
    "norm": lambda m: m.weight.norm().item(),
    "forward": lambda m: m(X),
    "embedding": lambda m: F.embedding(torch.tensor([1]), m.weight),
    "layer_norm": lambda m: F.layer_norm(X, (12,), m.weight[0]),
    "+=": lambda m: X.clone().add_(m.weight.data),
    "all_reduce": lambda m: zcomm.init().all_reduce(m.weight),
    "broadcast": lambda m: zcomm.init().broadcast(m.weight.data, root=0),
    "backward": lambda m: m.weight.sum().backward(),
    "share_memory": lambda m: m.share_memory(),
    "Parameter": lambda m: nn.Parameter(m.weight.data),
    "state_dict": lambda m: torch.save(m.state_dict(), io.BytesIO()),
    "save": lambda m: torch.save(m, io.BytesIO()),
    "deepcopy(state_dict)": lambda m: copy.deepcopy(m.state_dict()),
    "load_state_dict": lambda m: nn.Linear(12, 12).load_state_dict(m.state_dict()),
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "weight_norm": lambda m: parametrizations.weight_norm(m).weight.sum().item(),
    "average": lambda m: torch.optim.swa_utils.AveragedModel(m).module.weight.mean().item(),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_without_a_value_names_the_remedy(use: str) -> None:
    with pytest.raises(RuntimeError, match=r"of zcomm\.zero\.Init\(\) has no value here(.|\n)*GatheredParameters"):
        USES[use](lone())
    zcomm.shutdown()


def test_a_weight_norm_inside_of_init_has_no_value_outside() -> None:
    with Init(min_count=64):
        model = parametrizations.weight_norm(nn.Linear(12, 12))
    with pytest.raises(RuntimeError, match=r"of zcomm\.zero\.Init\(\) has no value here"):
        model.weight.sum().item()
    with GatheredParameters(model.parameters()):
        assert torch.allclose(model.weight, model.parametrizations.weight.original1)


def test_what_needs_no_value_works() -> None:
    model = lone()
    weight: Any = model.weight
    assert "of zcomm.zero.Init()" in f"{weight} {weight.data!r}"
    assert (weight.stride(), len(weight), weight.data[1:].t().shape) == ((12, 1), 12, (12, 11))
    for made in (torch.zeros_like(weight), weight.new_zeros(3), weight.data.new_empty(2), X.double().to(weight)):
        assert not made.is_meta and made.is_cpu and made.dtype == torch.float32
    assert torch.ones(2).double().type_as(weight).tolist() == [1.0, 1.0]
    assert type(weight)(torch.ones(2)).tolist() == [1.0, 1.0]
    half = copy.deepcopy(model).half()
    half.weight.data = half.weight.data.to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16 and half.weight.is_meta and weight.dtype == torch.float32


def test_a_copy_is_as_the_model() -> None:
    torch.manual_seed(3)
    model = lone()
    model.weight.requires_grad_(requires_grad=False)
    pair = nn.ModuleList([model, model])
    pair[0].tied = model.weight
    twins = copy.deepcopy(pair)
    assert twins[0].weight is twins[1].tied and twins[0].weight is not model.weight
    assert not twins[0].weight.requires_grad and twins[0].bias.requires_grad
    torch.manual_seed(3)
    want = nn.Linear(12, 12).weight
    with GatheredParameters([model.weight, twins[0].weight]):
        assert torch.equal(model.weight, want) and torch.equal(twins[0].weight, want)
    with GatheredParameters(model.weight, modifier_rank=0):
        inside = copy.deepcopy(model)
        assert torch.equal(inside.weight, want) and type(inside.weight) is nn.Parameter
    nn.init.zeros_(twins[0].weight)
    with pytest.raises(ValueError, match=r"was changed after zcomm\.zero\.Init\(\) had ended"):
        copy.deepcopy(twins)
