"""State dicts and checkpoints of divided experts: each name once, whole, for any number of ranks, equal to the bit."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from tiers import slow
from zcomm.parallel import MoE, divide_experts
from zcomm.zero.checkpoint.export import export

Run = Callable[..., list[Any]]
DIM, EXPERTS = 6, 4


class MixtralExperts(nn.Module):
    """Experts in one tensor, as transformers' class of this name has them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 5, DIM) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, DIM, 5) / 4)

    def forward(self, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(rows)
        for number in range(self.num_experts):
            token, slot = (index == number).nonzero(as_tuple=True)
            hidden = (rows[token] @ self.up[number].t()).tanh() @ self.down[number].t()
            out = out.index_add(0, token, hidden * weights[token, slot, None])
        return out


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += len(x)
        result: torch.Tensor = self.inner(x).tanh()
        return result


class Model(nn.Module):
    """Layers with experts as modules and in one tensor, and some of their weights frozen."""

    def __init__(self, mesh: zcomm.ProcessMesh | None, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, DIM)
        self.moe = MoE(DIM, Expert, EXPERTS, mesh=mesh)
        self.gate = nn.Linear(DIM, EXPERTS)
        self.experts, self.frozen = MixtralExperts(), MixtralExperts()
        if mesh is not None and "expert" in mesh.axes:
            divide_experts(self, mesh)
        self.frozen.up.requires_grad_(False)
        for expert in self.moe.experts:
            expert.inner.bias.requires_grad_(False)  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        more, aux = self.moe(x)
        x = x + more
        weights, index = self.gate(x).softmax(-1).topk(2)
        x = x + self.experts(x, index, weights) + self.frozen(x, index, weights)
        result: torch.Tensor = x.square().mean() + 0.05 * aux
        return result


def differ(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return the names that are in one of both, or have other values."""
    return [
        name
        for name in found.keys() | wanted.keys()
        if name not in found or name not in wanted or not torch.equal(found[name], wanted[name])
    ]


def state_dicts() -> None:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(expert=2)
    model, whole, other = Model(mesh), Model(None), Model(None, 4).state_dict()
    assert list(model.state_dict()) == list(whole.state_dict())
    assert not differ(model.state_dict(), whole.state_dict())
    assert not differ(model.moe.state_dict(), whole.moe.state_dict())
    model.load_state_dict(other)
    assert not differ(model.state_dict(), other)
    own = model.state_dict(keep_vars=True)
    assert own["experts.up"] is model.experts.up
    assert own[f"moe.experts.{2 * comm.rank}.inner.weight"] is model.moe.experts[0].inner.weight
    with pytest.raises(RuntimeError, match=r"experts\.up: expected all experts, \(4, 5, 6\)"):
        model.load_state_dict(other | {"experts.up": other["experts.up"][:2]})
    with pytest.raises(RuntimeError, match=r"moe\.experts\.4\.inner\.weight: there are 4 experts"):
        model.load_state_dict(other | {"moe.experts.4.inner.weight": torch.zeros(DIM, DIM)})
    model.load_state_dict(copy.deepcopy(other), assign=True)  # new parameters without marks
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.1, mesh=mesh, stage=3)
    assert model.moe.experts[1].inner.bias.group_name == "ep_size_2"  # type: ignore[union-attr]
    assert not differ(model.state_dict(), other)
    assert not differ(opt.full_state_dict(), other)
    model(torch.ones(3 + comm.rank, 3)).backward()
    opt.step()
    found = opt.full_state_dict()
    assert not differ(model.state_dict(), found)
    assert torch.equal(zcomm.zero.full_param(model.experts.up), found["experts.up"])
    assert torch.equal(zcomm.zero.full_param(model.frozen.up), other["frozen.up"])
    assert zcomm.zero.full_optim_state(model.experts.down, "exp_avg").shape == (EXPERTS, DIM, 5)
    zcomm.zero.set_full_param(model.experts.up, torch.full((EXPERTS, 5, DIM), 2.0))
    assert torch.equal(model.state_dict()["experts.up"], torch.full((EXPERTS, 5, DIM), 2.0))
    model.load_state_dict(other)
    assert not differ(opt.full_state_dict(), other)
    opt.close()


def test_state_dicts_have_all_experts(run_ranks: Run) -> None:
    run_ranks(state_dicts, 2)


def without_memory() -> None:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(comm.rank)
    with zcomm.zero.Init():
        model = nn.Sequential(MixtralExperts())
    params = list(model.parameters())
    mesh = zcomm.ProcessMesh(expert=2)
    divide_experts(model, mesh)
    assert all(now is before for now, before in zip(model.parameters(), params, strict=True))
    torch.manual_seed(0)
    wanted = nn.Sequential(MixtralExperts()).state_dict()
    assert params[0].shape[0] == 2 and not differ(model.state_dict(), wanted)
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, mesh=mesh, stage=3)
    assert not differ(opt.full_state_dict(), wanted)
    opt.close()


def test_experts_without_memory_are_divided(run_ranks: Run) -> None:
    run_ranks(without_memory, 2)


def on_one_rank() -> None:
    comm = zcomm.init(timeout=60)
    model = Model(zcomm.ProcessMesh(expert=2))
    with pytest.raises(zcomm.CollectiveMismatch, match=r"all_gather .*'state_dict\(\) moe"):
        model.state_dict() if comm.rank == 0 else model(torch.ones(2, 3))


def marked_by_hand() -> None:
    zcomm.init(timeout=60)
    model = nn.Linear(2, 2)
    for param in model.parameters():
        param.allreduce, param.group_name = False, "ep_size_2"  # type: ignore[attr-defined]
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, mesh=zcomm.ProcessMesh(expert=2))
    for call in (opt.full_state_dict, lambda: opt.save("nowhere")):
        with pytest.raises(NotImplementedError, match="different tensors of one name"):
            call()
    opt.close()


def test_experts_that_cannot_be_joined_are_errors(run_ranks: Run) -> None:
    run_ranks(marked_by_hand, 2)
    run_ranks(on_one_rank, 2)


def build(sizes: dict[str, int], how: dict[str, Any], seed: int) -> tuple[Model, zcomm.ZeroOptimizer]:
    mesh = zcomm.ProcessMesh(**sizes)
    model = Model(mesh, seed)
    return model, zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh, **how)


def values(opt: zcomm.ZeroOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = dict(opt.full_state_dict())
    for piece in opt.iter_state():
        for key, value in piece.values.items():
            assert piece.begin == 0
            found[f"{key} of {piece.name}"] = value.clone()
    return found


def step(model: Model, opt: zcomm.ZeroOptimizer, number: int, rank: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + rank)
    model(torch.randn(4 + rank, 3, generator=generator)).backward()
    opt.step()
    opt.zero_grad()


def saved(folder: str, sizes: dict[str, int], how: dict[str, Any]) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    model, opt = build(sizes, how, 3)
    for number in range(3):
        step(model, opt, number, comm.rank)
    opt.save(f"{folder}/first", client_state={"step": 3})
    found = values(opt)
    background = opt.save(f"{folder}/second", wait=False)
    step(model, opt, 3, comm.rank)
    background.wait()
    opt.close()
    return found


def loaded(folder: str, sizes: dict[str, int], how: dict[str, Any]) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    model, opt = build(sizes, how, 9)
    assert opt.load(f"{folder}/second") is None
    second = values(opt)
    assert opt.load(f"{folder}/first") == {"step": 3}
    found = values(opt)
    assert not differ(second, found)
    with torch.no_grad():
        zcomm.zero.set_full_param(model.experts.up, torch.zeros(EXPERTS, 5, DIM))
    zcomm.zero.load_weights(opt, f"{folder}/first")
    assert not differ(opt.full_state_dict(), {name: found[name] for name in model.state_dict()})
    step(model, opt, 3, comm.rank)
    opt.close()
    return found


FOUR, TWO, ONE = {"expert_data": 2, "expert": 2}, {"expert": 2}, {"expert": 1}


@pytest.mark.parametrize(
    ("first", "others", "how"),
    [
        (TWO, [ONE], {"stage": 2, "precision": "bf16"}),
        (ONE, [TWO], {"stage": 3}),
        slow(FOUR, [ONE, TWO, {"expert": 4}], {"stage": 1}),
        slow({"expert": 4}, [FOUR, ONE], {"stage": 3, "precision": "bf16"}),
        slow(FOUR, [TWO], {"stage": 3, "offload": "nvme"}),
    ],
)
def test_a_checkpoint_of_experts_loads_for_any_number_of_ranks(
    first: dict[str, int], others: list[dict[str, int]], how: dict[str, Any], run_ranks: Run, tmp_path: Path
) -> None:
    if "offload" in how:
        how = {**how, "nvme_path": str(tmp_path)}
    wanted = run_ranks(saved, math.prod(first.values()), str(tmp_path), first, how)[0]
    for sizes in others:
        found = run_ranks(loaded, math.prod(sizes.values()), str(tmp_path), sizes, how)
        assert not differ(found[0], wanted), sizes
        names = wanted.keys() & Model(None).state_dict().keys()
        for each in itertools.islice(found, 1, None):
            assert not differ(each, {name: wanted[name] for name in names}), sizes
    (file,) = export(tmp_path / "first", tmp_path / "model.safetensors")
    tensors = load_file(file)
    model = Model(None, 9)
    model.load_state_dict(tensors)
    assert not differ(
        model.to(torch.float32).state_dict(),
        {name: wanted[name].to(value.dtype) for name, value in model.state_dict().items()},
    )
