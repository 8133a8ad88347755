"""Experts on several ranks, compared with one model that has all of them, with the same routes.

The oracle is one rank with all experts: it computes the loss of each rank's samples, and averages. In fp64 there is no
ZeroOptimizer. Gradients are added here by its rules: experts over the ranks with the same ones, others over all ranks.
In fp32 ZeroOptimizer does that, and clips by the norm of all elements.
"""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.parallel import MoE

Run = Callable[..., list[Any]]
STEPS, DIM, EXPERTS = 20, 6, 4


class Model(nn.Module):
    """A small network with two layers of experts."""

    def __init__(self, mesh: zcomm.ProcessMesh | None, k: int = 2, capacity: float | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)

        def expert() -> nn.Module:
            return nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM))

        self.first = nn.Linear(3, DIM)
        self.moe1 = MoE(DIM, expert, EXPERTS, mesh=mesh, k=k, capacity=capacity)
        self.moe2 = MoE(DIM, expert, EXPERTS, mesh=mesh, k=1)
        self.last = nn.Linear(DIM, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        more, aux1 = self.moe1(x)
        x = x + more
        more, aux2 = self.moe2(x)
        return self.last(x + more), aux1 + aux2


def loss_of(model: nn.Module, rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the loss of a rank's samples: an odd number, and none on rank 1 in some steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = 0 if rank == 1 and step % 3 == 2 else 3 + 2 * rank + step % 2
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64).to(dtype)
    out, aux = model(x)
    result: torch.Tensor = (out - x.sum(1, keepdim=True)).square().sum() / 8 + 0.05 * aux
    return result


def of_ranks(named: dict[str, torch.Tensor], mesh: zcomm.ProcessMesh) -> dict[str, torch.Tensor]:
    """Return the tensors of a model with all experts that this rank's model has, by its names."""
    local = EXPERTS // mesh.size("expert")
    first = mesh.coordinate[mesh.axes.index("expert")] * local
    found = {}
    for name, value in named.items():
        head, _, tail = name.partition(".experts.")
        number, _, rest = tail.partition(".")
        if not tail:
            found[name] = value
        elif first <= int(number) < first + local:
            found[f"{head}.experts.{int(number) - first}.{rest}"] = value
    return found


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert not [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def in_fp64(sizes: dict[str, int], k: int, capacity: float | None) -> None:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(**sizes)
    model, whole = Model(mesh, k, capacity).double(), Model(None, k, capacity).double()
    same = mesh.comm(*(axis for axis in mesh.axes if axis != "expert"), use="test")
    same_tensors(model.state_dict(), whole.state_dict())
    for step in range(STEPS):
        losses = [loss_of(whole, rank, step, torch.float64) for rank in range(comm.world_size)]
        (torch.stack(losses).sum() / comm.world_size).backward()
        loss = loss_of(model, comm.rank, step, torch.float64)
        assert abs(float(loss.detach() - losses[comm.rank].detach())) < 1e-9
        loss.backward()
        wanted = of_ranks(grads_of(whole), mesh)
        for name, param in model.named_parameters():
            assert param.grad is not None, name
            ranks = same if getattr(param, "allreduce", True) is False else comm
            ranks.all_reduce(param.grad)
            param.grad /= comm.world_size
            assert float((param.grad - wanted.get(name, torch.zeros(()))).abs().max()) < 1e-9, (step, name)
        with torch.no_grad():
            for each in (model, whole):
                for param in each.parameters():
                    if param.grad is not None:
                        param -= 0.05 * param.grad
                    param.grad = None
    comm.barrier()


@pytest.mark.parametrize(
    ("sizes", "k", "capacity"),
    [
        ({"expert": 2}, 2, None),
        ({"expert_data": 2, "expert": 2}, 2, None),
        slow({"expert": 4}, 1, None),
        slow({"expert_data": 2, "expert": 2}, 3, 0.7),
    ],
)
def test_results_and_gradients_are_those_of_one_rank(
    sizes: dict[str, int], k: int, capacity: float | None, run_ranks: Run
) -> None:
    world = 1
    for size in sizes.values():
        world *= size
    run_ranks(in_fp64, world, sizes, k, capacity)


CASES: list[dict[str, Any]] = [
    {"stage": 2, "clip_norm": 0.3, "grad_accum": 2, "bucket_mb": 0.0005},
    {"stage": 1},
    {"stage": 0, "clip_norm": 0.3},
    {"stage": 2, "offload": "cpu", "overlap": False, "grad_accum": 3},
    {"stage": 2, "offload": "nvme"},
    {"stage": 3, "clip_norm": 0.3, "grad_accum": 2, "bucket_mb": 0.0005},
    {"stage": 3, "offload": "nvme", "units": ["moe1", "moe2"]},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", update="forward")},
]


def with_zero(sizes: dict[str, int], cases: list[int], folder: str) -> None:
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(**sizes)
    for case in (CASES[number] for number in cases):
        model, whole = Model(mesh), Model(None)
        accum, clip_norm = case.get("grad_accum", 1), case.get("clip_norm")
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.05, momentum=0.9, mesh=mesh, nvme_path=folder, **case)
        ref = torch.optim.SGD(whole.parameters(), lr=0.05, momentum=0.9)
        for step in range(STEPS):
            for micro in range(step * accum, (step + 1) * accum):
                losses = [loss_of(whole, rank, micro, torch.float32) for rank in range(comm.world_size)]
                (torch.stack(losses).sum() / comm.world_size / accum).backward()
                loss = loss_of(model, comm.rank, micro, torch.float32)
                assert abs(float(loss.detach() - losses[comm.rank].detach())) < 1e-5, (case, micro)
                with opt.no_sync() if accum == 3 and micro % 3 == 1 else nullcontext():
                    loss.backward()
                if micro == (step + 1) * accum - 1 and step % 7 == 0:
                    wanted = of_ranks(grads_of(whole), mesh)
                    for name, param in model.named_parameters():
                        found = zcomm.zero.full_grad(param)
                        assert found is not None and param.grad is not None
                        expected = wanted.get(name, torch.zeros_like(param))
                        assert torch.allclose(found, expected, atol=1e-5), (case, step, name)
                        assert float(param.grad.norm()) == pytest.approx(float(expected.norm()), abs=1e-5)
                opt.step()
                opt.zero_grad()
            norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), clip_norm or torch.inf)
            ref.step()
            ref.zero_grad()
            assert opt.grad_norm == pytest.approx(float(norm), rel=1e-5), (case, step)
        found, weights = opt.full_state_dict(), whole.state_dict()
        assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in weights.items()), case
        same_tensors(model.state_dict(), found)
        opt.close()


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"expert": 2}, [0, 5]),
        ({"expert_data": 2, "expert": 2}, [0]),
        slow({"expert_data": 2, "expert": 2}, [1, 2, 3, 4]),
        slow({"expert_data": 2, "expert": 2}, [5, 6, 7]),
        slow({"expert": 2, "expert_data": 2}, [0, 1]),
        slow({"replicate": 2, "expert": 2}, [0, 1]),
    ],
)
def test_training_is_that_of_one_rank(sizes: dict[str, int], cases: list[int], run_ranks: Run, tmp_path: Any) -> None:
    world = 1
    for size in sizes.values():
        world *= size
    run_ranks(with_zero, world, sizes, cases, str(tmp_path))


def refusals() -> None:
    zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(expert=2)
    model = Model(mesh)
    with pytest.raises(ValueError, match=r"is an expert's .*'ep_size_2'"):
        zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    with pytest.raises(NotImplementedError, match="lamb, which needs whole"):
        zcomm.ZeroOptimizer(model, "lamb", lr=0.1, mesh=mesh)
    with pytest.raises(ValueError, match="5 experts do not divide among 2 ranks"):
        MoE(DIM, nn.Linear(DIM, DIM), 5, mesh=mesh)
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.1, mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"state_dict\(\): .* different experts of one number"):
        opt.state_dict()
    opt.close()
    with pytest.raises(TypeError, match="it has all experts"):
        pickle.dumps(model)
    again = copy.deepcopy(model)
    assert again.moe1.ranks is model.moe1.ranks
    assert all(param.group_name == "ep_size_2" for param in again.moe1.experts.parameters())  # type: ignore[attr-defined]
    for _ in range(2):  # the same calls on both ranks
        again(torch.ones(3, 3))


def test_refusals_and_copies(run_ranks: Run) -> None:
    run_ranks(refusals, 2)


def killed() -> None:
    comm = zcomm.init(timeout=60)
    model = Model(zcomm.ProcessMesh(expert=2))
    model(torch.ones(3, 3))
    if comm.rank == 1:
        import os

        os._exit(3)
    time.sleep(0.1)
    model(torch.ones(3, 3))


def test_a_rank_that_is_killed_in_an_exchange_is_named(run_ranks: Run) -> None:
    result = run_ranks(killed, 2, check=False)[0]
    assert result.error is not None
    assert (result.error.kind, result.error.rank) == ("PeerLost", 1)
    assert "rows for experts" in result.error.message


def test_memory_of_rows_is_used_again_when_no_tensor_has_it() -> None:
    from zcomm.parallel.exchange import _Memory

    memory = _Memory()

    def take(rows: int = 1000) -> torch.Tensor:
        return memory.take(rows, 512, torch.float32, torch.device("cpu"))

    first, other = take(1024), take(1024)
    place = first.data_ptr()
    holds: Any = first[3:5]
    del first
    assert take(1024).data_ptr() != place and other._base is None
    holds = holds.numpy()
    assert take().data_ptr() != place
    del holds
    again = take()
    assert again.data_ptr() == place
    weight = nn.Parameter(torch.ones(512))
    loss = (again * weight).sum()  # backward needs the rows
    del again
    assert take().data_ptr() != place
    loss.backward()
    del loss
    assert take().data_ptr() == place
    assert take(4096).shape == (4096, 512)  # other sizes free the rest
