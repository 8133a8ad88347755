"""Hybrid shards: ZeRO on a mesh, with copies of the shards (HSDP), and with axes that other libraries divide.

The oracle adds all ranks' gradients in fp32, in the order of the mesh. First come a shard group's ranks by place,
micro-step by micro-step, then the groups. It divides once. A world of one rank steps with them. Every stage, tier and
size on the mesh must have its bits.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import zcomm
from tiers import slow
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory.plan import Settings, plan_memory
from zero_jobs import batch, digest, loss_of, share_small_buckets, small_gpt

Run = Callable[..., list[Any]]
STEPS = 3


def total_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add tensors in their order, in fp32."""
    total = tensors[0].float()
    for each in tensors[1:]:
        total = total + each.float()
    return total


def reference(groups: Sequence[Sequence[int]], accum: int = 1, clip_norm: float | None = None) -> dict[str, Any]:
    """Train on rank 0 with the gradients of all. groups: shard groups, in order. Returns: the same on all ranks."""
    comm = zcomm.init(timeout=60)
    alone = comm.split(0 if comm.rank == 0 else None)
    if alone is None:
        found: dict[str, Any] = zcomm.zero.agree.all_values(comm, None, "reference")[0]
        return found
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, stage=1, comm=alone, clip_norm=clip_norm)
    params, norms = list(model.parameters()), []
    for step in range(STEPS):
        sums = [[torch.zeros(p.shape) for _ in groups] for p in params]
        for micro in range(accum):
            of_ranks = [
                torch.autograd.grad(loss_of(model, *batch(rank, step * accum + micro)), params)
                for rank in range(comm.world_size)
            ]
            for of_groups, grads in zip(sums, zip(*of_ranks, strict=True), strict=True):
                for sum_, group in zip(of_groups, groups, strict=True):
                    sum_ += total_of([grads[rank] for rank in group])
        for param, of_groups in zip(params, sums, strict=True):
            param.grad = total_of(of_groups) / comm.world_size / accum
        opt.step()
        opt.zero_grad()
        norms.append(float(opt.grad_norm or 0).hex())
    result = {"norms": norms, "weights": digest(opt.full_state_dict())}
    opt.close()
    alone.close()
    zcomm.zero.agree.all_values(comm, result, "reference")
    return result


def train(mesh: Any, folder: str, accum: int = 1, optimizer: str = "adamw", **arguments: Any) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    share_small_buckets()
    model = small_gpt(seed=3 + comm.rank)  # rank 0's weights must win
    opt = zcomm.ZeroOptimizer(model, optimizer, lr=3e-3, mesh=mesh, grad_accum=accum, nvme_path=folder, **arguments)
    norms = []
    for number in range(STEPS * accum):
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()
        if (number + 1) % accum == 0:
            norms.append(float(opt.grad_norm or 0).hex())
    result = {"norms": norms, "weights": digest(opt.full_state_dict())}
    opt.close()
    return result


CASES: list[dict[str, Any]] = [
    {"stage": 0, "bucket_mb": 0.02},
    {"stage": 1, "overlap": False},
    {"stage": 2, "bucket_mb": 0.02},
    {"stage": 2, "offload": "nvme", "bucket_mb": 0.02},
    {"stage": 3, "bucket_mb": 0.02},
    {"stage": 3, "share_parameters": False, "bucket_mb": 0.02},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", gradients="nvme"), "bucket_mb": 0.02},
    {
        "stage": 3,
        "offload": zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward"),
        "bucket_mb": 0.02,
    },
]


def compare(
    sizes: dict[str, int], cases: Sequence[dict[str, Any]], folder: str, accum: int, clip_norm: float | None
) -> None:
    common: dict[str, Any] = {"accum": accum, "clip_norm": clip_norm}
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(**sizes)
    wanted = reference(mesh.groups("shard"), **common)
    for case in cases:
        assert train(mesh, folder, **case, **common) == wanted, f"rank {comm.rank}: {case}"


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ({"replicate": 2, "shard": 2}, [3, 5, 6]),
        slow({"replicate": 2, "shard": 2}, [0, 1, 2, 4, 7]),
        slow({"replicate": 3, "shard": 2}, [5, 6]),
    ],
)
def test_a_mesh_adds_in_its_groups_and_then_across(
    sizes: dict[str, int], cases: list[int], run_ranks: Run, tmp_path: Any
) -> None:
    world_size = sizes["replicate"] * sizes["shard"]
    run_ranks(compare, world_size, sizes, [CASES[case] for case in cases], str(tmp_path), 1, None)


def on_two_hosts(folder: str) -> None:
    """Compare shard groups of a host with the oracle, and with stage 3 over all ranks."""
    os.environ["ZCOMM_HOST_ID"] = f"host {int(os.environ['RANK']) // 2}"
    comm = zcomm.init(timeout=60)
    assert comm.backend == "hierarchical"
    compare({"replicate": 2, "shard": 2}, [CASES[5], CASES[7]], folder, 1, None)
    compare({"shard": 2, "replicate": 2}, [CASES[2]], folder, 1, None)  # shards between hosts, copies inside
    mesh = zcomm.ProcessMesh(replicate=2, shard=2)
    assert train(mesh, folder, stage=3) == train(None, folder, stage=3)
    three = {"accum": 3, "bucket_mb": 0.02, "stage": 3}
    wanted = train(None, folder, **three)
    for case in ({}, {"hpz": True}, {"share_parameters": False}, {"offload": CASES[6]["offload"]}):
        assert train(mesh, folder, across="micro", **three, **case) == wanted, case
    assert train(mesh, folder, **three) != wanted


def test_groups_of_hosts(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(on_two_hosts, 4, str(tmp_path))


@pytest.mark.slow
def test_accumulation_and_clipping_on_a_mesh(run_ranks: Run, tmp_path: Any) -> None:
    sizes = {"replicate": 2, "shard": 2}
    run_ranks(compare, 4, sizes, [CASES[2], CASES[5], CASES[6]], str(tmp_path), 2, 0.3)


def looked_at(folder: str, case: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Return digests of all that a program can see of one optimizer, and change a weight from rank 2."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(**sizes)
    share_small_buckets()
    model = small_gpt(seed=3 + comm.rank)
    opt = zcomm.ZeroOptimizer(model, lr=3e-3, mesh=mesh, nvme_path=folder, **case)
    param = next(p for p in model.parameters() if p.dim() == 2)
    for number in range(2):
        loss_of(model, *batch(0, number)).backward()  # the same samples on all ranks, so that orders do not count
        grad = zcomm.zero.full_grad(param)
        assert grad is not None and param.grad is not None
        norm = float(param.grad.norm())
        assert norm == pytest.approx(float(grad.norm()), rel=1e-6)
        opt.step()
        opt.zero_grad()
    found: dict[str, Any] = {"grad": digest({"": grad})}
    with zcomm.zero.GatheredParameters(model, modifier_rank=2):
        if comm.rank == 2:
            with torch.no_grad():
                param.add_(1.0)
    found["param"] = digest({"": zcomm.zero.full_param(param)})
    found["state"] = digest({"": zcomm.zero.full_optim_state(param, "exp_avg")})
    zcomm.zero.set_full_optim_state(param, torch.full(param.shape, 0.25), "exp_avg")
    found["set"] = digest({"": zcomm.zero.full_optim_state(param, "exp_avg")})
    pieces: dict[str, list[torch.Tensor]] = {}
    for piece in opt.iter_state(root=3):
        assert comm.rank == 3
        for key, value in piece.values.items():
            pieces.setdefault(f"{piece.name}.{key}", []).append(value.clone())
    rows = {name: torch.cat([each.view(-1) for each in values]) for name, values in pieces.items()}
    found["pieces"] = zcomm.zero.agree.all_values(comm, digest(rows) if rows else None, "pieces")[3]
    found["all"] = bits_of(opt)
    found["model"] = digest(dict(model.state_dict()))
    opt.close()
    return found


def look(folder: str, cases: list[int]) -> list[Any]:
    found = []
    for case in (CASES[case] for case in cases):
        wanted = looked_at(folder, case, {"shard": 4})
        for sizes in ({"replicate": 2, "shard": 2}, {"shard": 2, "replicate": 2}):
            assert looked_at(folder, case, sizes) == wanted, f"{case} {sizes}"
        found.append(wanted)
    return found


@pytest.mark.parametrize("cases", [[6], slow([2, 5])])
def test_whole_tensors_count_one_copy(cases: list[int], run_ranks: Run, tmp_path: Any) -> None:
    every = run_ranks(look, 4, str(tmp_path), cases)
    assert all(each == every[0] for each in every)


def bits_of(opt: zcomm.ZeroOptimizer) -> str:
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    return digest({**opt.full_state_dict(), **arrays})


def save_and_load(folder: str, worlds: list[int]) -> None:
    """Save and load between a mesh and plain worlds of 1 to 4 ranks, which are parts of the job."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(shard=2, replicate=2)
    share_small_buckets()
    units = {"stage": 3, "offload": zcomm.Offload("nvme", "nvme"), "bucket_mb": 0.02, "nvme_path": folder, "lr": 3e-3}
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, mesh=mesh, **units)
    for number in range(2):
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()
    opt.save(f"{folder}/mesh").wait()
    opt.save(f"{folder}/behind", wait=False).wait()
    wanted = bits_of(opt)
    opt.close()
    for world_size in worlds:
        part = comm.split(0 if comm.rank < world_size else None)
        for saved in ("mesh", "behind") if part is not None else ():
            model = small_gpt(seed=9)
            opt = zcomm.ZeroOptimizer(model, "adamw", lr=3e-3, stage=2, comm=part)
            opt.load(f"{folder}/{saved}")
            if saved == "mesh":
                opt.save(f"{folder}/of {world_size}").wait()
            assert bits_of(opt) == wanted, f"{saved} at {world_size}"
            opt.close()
        comm.barrier()
        model = small_gpt(seed=9)
        opt = zcomm.ZeroOptimizer(model, mesh=mesh, **units)
        opt.load(f"{folder}/of {world_size}")
        assert bits_of(opt) == wanted, f"from {world_size}"
        opt.close()


@pytest.mark.parametrize("worlds", [[1, 3], slow([2, 4])])
def test_checkpoints_load_on_other_meshes(worlds: list[int], run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(save_and_load, 4, str(tmp_path), worlds)


def unsynced(folder: str) -> None:
    """Compare passes without sync, and one that an overflow skips, with plain stage 2 on integer gradients."""
    comm = zcomm.init(timeout=60)

    def run(**arguments: Any) -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = torch.nn.Linear(40, 30)
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=2.0**-6, precision="fp16", nvme_path=folder, **arguments)
        x = torch.randint(-3, 4, (4, 40), generator=torch.Generator().manual_seed(comm.rank)).half()
        with opt.no_sync():
            opt.backward(model(x).sum())
        opt.backward(model(x[:2]).sum())
        assert model.weight.grad is not None
        model.weight.grad.mul_(0.5)
        opt.step()
        opt.zero_grad()
        if comm.rank == 3:
            x = x * float("inf")
        opt.backward(model(x).sum())
        opt.step()
        opt.zero_grad()
        found = digest(opt.full_state_dict()), opt.skipped_steps, opt.loss_scale, opt.nonfinite, opt.grad_norm
        opt.close()
        return found

    wanted = run(stage=2, loss_scale=16.0)
    assert wanted[1] == 1
    mesh = zcomm.ProcessMesh(replicate=2, shard=2)
    for case in (CASES[2], CASES[5], CASES[6], {"stage": 3, "hpz": True}):
        assert run(mesh=mesh, loss_scale=16.0, **case)[:4] == wanted[:4], str(case)


def test_local_sums_edits_and_overflow_on_a_mesh(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(unsynced, 4, str(tmp_path))


def within_a_limit(folder: str) -> None:
    """Compare the bytes of the plan with those that an optimizer on a mesh holds, and train within ``memory=``."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(replicate=2, shard=2)
    form = TileForm(("exp_avg", "exp_avg_sq"), torch.float32, torch.float32)
    nvme = zcomm.Offload("nvme", "nvme", gradients="nvme")
    for stage, offload, shared in ((2, zcomm.Offload(), True), (3, nvme, True), (3, zcomm.Offload(), False)):
        model = small_gpt()
        given: dict[str, Any] = {"bucket_mb": 0.02, "prefetch": 1, "units": zcomm.zero.Units()}
        found = plan_memory(
            model, Settings(stage, offload, 2, zcomm.zero.Precision(), form, shared=shared, hops=True, **given)
        )
        arguments = {**given, "stage": stage, "offload": offload, "share_parameters": shared, "nvme_path": folder}
        opt = zcomm.ZeroOptimizer(model, mesh=mesh, **arguments)
        loss_of(model, *batch(comm.rank, 0)).backward()
        opt.step()
        assert opt.memory() == found.memory, f"stage {stage}: {opt.memory()} {found.memory}"
        opt.close()
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, mesh=mesh, stage=3, offload="nvme", nvme_path=folder, memory="8GiB")
    loss_of(model, *batch(comm.rank, 0)).backward()
    opt.step()
    opt.close()


@pytest.mark.slow
def test_the_plan_counts_a_shard_group(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(within_a_limit, 4, str(tmp_path))


REFUSED = {
    "rank 0 has replicate=2 x shard=2, but rank 2 has data=4; give the same mesh on all ranks": None,
    "axis 'row' is not one of shard, data, expert_data, sequence, expert, replicate, tensor, pipe": {
        "replicate": 2,
        "row": 2,
    },
    "has both 'shard' and 'data'": {"data": 2, "shard": 2},
    "has both 'data' and 'expert_data'": {"data": 2, "expert_data": 2},
}


def pieces_on_other_ranks(mesh: DeviceMesh, case: dict[str, Any]) -> None:
    """Compare the pieces that each rank may get with whole tensors; groups are not in the order of the job."""
    torch.manual_seed(5)
    model = torch.nn.Linear(70, 90)
    opt = zcomm.ZeroOptimizer(model, lr=0.1, mesh=mesh, **case)
    model(torch.ones(1, 70) * (1 + zcomm.init().rank)).sum().backward()
    opt.step()
    opt.zero_grad()
    wanted = {"weight": zcomm.zero.full_param(model.weight), "exp_avg": None}
    wanted["exp_avg"] = zcomm.zero.full_optim_state(model.weight, "exp_avg")
    for root in range(4):
        found: dict[str, list[torch.Tensor]] = {"weight": [], "exp_avg": []}
        for piece in opt.iter_state("weight", "exp_avg", root=root):
            for key, value in piece.values.items() if piece.name == "weight" else ():
                found[key].append(value.clone().view(-1))
        if zcomm.init().rank == root:
            assert all(bits(torch.cat(found[key])) == bits(value) for key, value in wanted.items()), f"{case} {root}"
        else:
            assert not found["weight"]
    opt.close()


def refuse(folder: str) -> None:
    comm = zcomm.init(timeout=30)
    good, layer = zcomm.ProcessMesh(replicate=2, shard=2), torch.nn.Linear(4, 4)
    for text, sizes in REFUSED.items():
        mesh = zcomm.ProcessMesh(**sizes) if sizes else good if comm.rank != 2 else None
        with pytest.raises((ValueError, NotImplementedError)) as found:
            zcomm.ZeroOptimizer(layer, mesh=mesh)
        assert text in str(found.value), found.value
    part = comm.split(comm.rank % 2)
    with pytest.raises(ValueError, match="is of a communicator with 4 ranks, but the world has 2"):
        zcomm.ZeroOptimizer(layer, comm=part, mesh=good)
    zcomm.ZeroOptimizer(layer, mesh=good).close()
    dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=comm.rank, world_size=4)
    opt = zcomm.ZeroOptimizer(layer, mesh=DeviceMesh("cpu", [[0, 2], [1, 3]]))
    assert opt._live.comms.mesh.groups("shard") == ((0, 2), (1, 3))
    opt.close()
    for case in ({"stage": 2}, {"stage": 3, "share_parameters": False}, {"stage": 3, "hpz": True}):
        pieces_on_other_ranks(DeviceMesh("cpu", [[3, 1], [0, 2]]), case)
    dist.destroy_process_group()


def test_a_wrong_mesh_is_one_error_on_all_ranks(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(refuse, 4, str(tmp_path))


def built_again(folder: str) -> None:
    """Build an optimizer of the weights that a closed one left in the shards of a mesh."""
    comm = zcomm.init(timeout=30)
    share_small_buckets()
    model = small_gpt(seed=3 + comm.rank)
    arguments = {**CASES[5], "optimizer": None}
    mesh, other = zcomm.ProcessMesh(replicate=2, shard=2), zcomm.ProcessMesh(shard=2, replicate=2)
    opt = zcomm.ZeroOptimizer(model, mesh=mesh, **arguments)
    wanted = digest(opt.full_state_dict())
    opt.close()
    with pytest.raises(ValueError, match="cut over ranks 0, 1; 2, 3, but the new one cuts over 0, 2; 1, 3: use the"):
        zcomm.ZeroOptimizer(model, mesh=other, **arguments)
    opt = zcomm.ZeroOptimizer(model, mesh=mesh, **arguments)
    assert digest(opt.full_state_dict()) == wanted
    opt.close()


def test_the_next_optimizer_has_the_same_groups(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(built_again, 4, str(tmp_path))


def drift() -> None:
    """Change a weight of rank 1 only, and compare at the second step, as at each hundredth."""
    zcomm.zero.groups.copies.STEPS = 2
    comm = zcomm.init(timeout=30)
    for case in (CASES[2], CASES[5]):
        model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Linear(40, 30))
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, mesh=zcomm.ProcessMesh(replicate=2, shard=2), **case)
        for step in range(3):
            if step == 1:
                value = zcomm.zero.full_param(model[1].weight)
                zcomm.zero.set_full_param(model[1].weight, value + 1.0 if comm.rank == 1 else value)
            model(torch.ones(1, 30)).sum().backward()
            if step < 2:
                opt.step()
            else:
                with pytest.raises(
                    RuntimeError, match=r"the copies of 1.weight on ranks 1, 3 are not equal: a program"
                ):
                    opt.step()
            opt.zero_grad()
        opt.close()


def test_copies_that_drift_apart_are_named(run_ranks: Run) -> None:
    run_ranks(drift, 4)


def bits(value: torch.Tensor | None) -> list[int]:
    assert value is not None
    return value.contiguous().view(torch.int32).flatten().tolist()


def passes(folder: str) -> None:
    """Run other passes than expected, and look at gradients between them."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(replicate=2, shard=2)
    share_small_buckets()
    for case in (CASES[2], CASES[6]):
        layer = torch.nn.Linear(70, 90, bias=False)
        opt = zcomm.ZeroOptimizer(layer, "sgd", lr=0.1, mesh=mesh, nvme_path=folder, grad_accum=3, **case)
        inputs = [torch.randn(3, 70, generator=torch.Generator().manual_seed(n)) for n in range(20)]
        weight = layer.weight

        def of_ranks(number: int) -> list[torch.Tensor]:
            return [inputs[4 * number + rank].sum(0).expand(90, 70) for rank in range(4)]  # noqa: B023

        def groups(number: int) -> list[torch.Tensor]:
            grads = of_ranks(number)
            return [grads[0] + grads[1], grads[2] + grads[3]]

        def backward(number: int) -> None:
            layer(inputs[4 * number + comm.rank]).sum().backward()  # noqa: B023

        means = [total_of(groups(number)) / 4 for number in range(4)]
        backward(0)
        assert bits(zcomm.zero.full_grad(weight)) == bits(means[0] * (1.0 / 3.0)), "a look makes means"
        opt.step()
        backward(1)
        opt.step()
        backward(2)
        wanted = bits((means[0] + means[1] + means[2]) * (1.0 / 3.0))
        assert bits(zcomm.zero.full_grad(weight)) == wanted, "later passes add means"
        opt.step()
        opt.zero_grad()
        backward(0)
        opt.step()
        backward(1)
        sums = [first + second for first, second in zip(groups(0), groups(1), strict=True)]
        opt.boundary = True
        before = zcomm.zero.full_param(weight)
        opt.step()
        after = zcomm.zero.full_param(weight)
        assert torch.allclose(before - after, 0.1 * total_of(sums) / 12, rtol=1e-5, atol=1e-6), "fewer passes"
        opt.zero_grad()
        opt.boundary, opt.grad_accum = None, 1
        backward(2)
        backward(3)
        assert bits(zcomm.zero.full_grad(weight)) == bits(means[2] + means[3]), "more passes"
        opt.close()


def test_passes_that_were_not_expected(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(passes, 4, str(tmp_path))


class Divided(torch.nn.Module):
    """A layer of which ranks along "tensor" have other rows, and a bias that they all have."""

    def __init__(self, place: int) -> None:
        super().__init__()
        torch.manual_seed(place)
        self.rows = torch.nn.Parameter(torch.randn(50, 30))
        self.rows.tensor_model_parallel = True  # type: ignore[attr-defined]
        self.bias = torch.nn.Parameter(torch.ones(50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.rows.t() * 0.5 + self.bias


def other_axes(folder: str) -> None:
    """Count parameters that ranks of another library divide, and sum over parts of sequences."""
    comm = zcomm.init(timeout=60)
    share_small_buckets()
    x = [torch.randn(2, 30, generator=torch.Generator().manual_seed(n)) for n in range(2)]  # by data rank
    rows = [total_of([each.sum(0).expand(50, 30) * 0.5 for each in x]) / 2] * 2
    bias = torch.full((50,), 2.0)
    norm = float(torch.cat([*(each.double().flatten() for each in rows), bias.double()]).norm())
    for axis, case in (("tensor", CASES[2]), ("tensor", CASES[6]), ("pipe", CASES[5])):
        mesh = zcomm.ProcessMesh(data=2, **{axis: 2})
        data, place = mesh.coordinate
        model = Divided(comm.rank)
        arguments = {**case, "nvme_path": folder, "skip_nonfinite": True}
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=1.0, mesh=mesh, clip_norm=1.0, **arguments)
        first = zcomm.zero.full_param(model.rows)
        assert bits(first) == bits(Divided(place).rows.detach()), "the first rank with the same tensors"
        model(x[data]).sum().backward()
        assert bits(zcomm.zero.full_grad(model.rows)) == bits(rows[place])
        opt.step()
        opt.zero_grad()
        counted = (
            norm
            if axis == "tensor"
            else float(torch.cat([each.double().flatten() for each in [*rows, bias, bias]]).norm())
        )
        assert opt.grad_norm == pytest.approx(counted, rel=1e-12)
        moved = first - zcomm.zero.full_param(model.rows)
        assert torch.allclose(moved, rows[place] / counted, rtol=1e-4, atol=1e-6)
        bad = x[data].clone()
        bad[0, 0] = float("nan") if comm.rank == 3 else 1.0
        model(bad).sum().backward()
        opt.step()
        assert opt.skipped_steps == 1, "on all ranks"
        opt.zero_grad()
        model(x[data]).sum().backward()
        if comm.rank == 0:
            model.rows.grad = None
        with pytest.raises(
            RuntimeError, match=r"step\(\): p.grad of rows is None on rank 0, the optimizer's on rank 1"
        ):
            opt.step()
        opt.zero_grad()
        before = [zcomm.zero.full_param(param) for param in model.parameters()]
        model(x[data]).sum().backward()
        for param in model.parameters() if place == 0 else ():
            param.grad = None
        opt.step()
        same = [
            bits(old) == bits(zcomm.zero.full_param(new)) for old, new in zip(before, model.parameters(), strict=True)
        ]
        assert same == [place == 0] * 2, "ranks with other tensors step without this rank's gradients"
        calls: list[Any] = [partial(opt.save, f"{folder}/save"), opt.iter_state]
        refused, words = RuntimeError, "rows is the name of two tensors, of stages 0 and 1"
        if axis == "tensor":
            calls.append(partial(opt.load, f"{folder}/save"))
            refused, words = NotImplementedError, "ranks have different tensors of one name"
        for call in calls:
            with pytest.raises(refused, match=words):
                list(call())
        opt.close()
    mesh = zcomm.ProcessMesh(data=2, sequence=2)
    layer = torch.nn.Linear(30, 50, bias=False)
    for case in (CASES[2], CASES[6]):
        opt = zcomm.ZeroOptimizer(layer, "sgd", lr=1.0, mesh=mesh, **{**case, "nvme_path": folder})
        parts = [torch.randn(2, 30, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        layer(parts[comm.rank]).sum().backward()
        wanted = total_of([each.sum(0).expand(50, 30) for each in parts]) / 2
        assert bits(zcomm.zero.full_grad(layer.weight)) == bits(wanted)
        opt.step()
        assert opt.grad_norm == pytest.approx(float(wanted.double().norm()), rel=1e-12)
        layer.load_state_dict(opt.full_state_dict())
        opt.close()
        layer = torch.nn.Linear(30, 50, bias=False)


def test_axes_that_other_libraries_divide(run_ranks: Run, tmp_path: Any) -> None:
    run_ranks(other_axes, 4, str(tmp_path))


def fail(folder: str) -> tuple[str, float]:
    """Let a read of rank 1 fail in a forward. Return the error of this rank, and its time."""
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(replicate=2, shard=2)
    share_small_buckets()
    model = small_gpt()
    drive = zcomm.Offload("nvme", "nvme", update="step")
    opt = zcomm.ZeroOptimizer(model, mesh=mesh, stage=3, offload=drive, nvme_path=folder, bucket_mb=0.02)
    begin = time.monotonic()
    try:
        for step in range(3):
            if step == 1 and comm.rank == 1:
                opt._live.store.source.fetch = refused
            loss_of(model, *batch(comm.rank, step)).backward()
            opt.step()
            opt.zero_grad()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    raise AssertionError("no error")


def die(late: bool) -> float:
    """Let rank 3 end in a backward pass. Return the time of this rank until its error."""
    comm, mesh = zcomm.init(timeout=120), zcomm.ProcessMesh(replicate=2, shard=2)
    layers = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(6)))
    opt = zcomm.ZeroOptimizer(layers, lr=1e-3, mesh=mesh, stage=2, bucket_mb=0.001)
    begin = time.monotonic()
    with pytest.raises((zcomm.PeerLost, RuntimeError), match="rank"):
        for step in range(3):
            if step == 1 and comm.rank == 3:
                layers[2 if late else 5].weight.register_hook(lambda grad: os._exit(1))
            layers(torch.ones(2, 40)).sum().backward()
            opt.step()
            opt.zero_grad()
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_dead_rank_ends_all_groups(late: bool, run_ranks: Run) -> None:
    *found, dead = run_ranks(die, 4, late, check=False)
    assert dead.exitcode == 1
    for result in found:
        assert result.error is None and result.value < 60, result.describe()


def refused(bucket: Any, out: torch.Tensor) -> Any:
    raise OSError(errno.EIO, "a drive of rank 1")


def test_an_error_of_one_group_ends_the_others(run_ranks: Run, tmp_path: Any) -> None:
    (first, _), (second, _), (third, waited), (fourth, also) = run_ranks(fail, 4, str(tmp_path))
    assert "a drive of rank 1" in first and "a drive of rank 1" in second
    cause = r"rank 0 failed: OSError: \[Errno 5\] gathering unit [\w.]+ failed on rank 1: OSError: .* a drive of rank 1"
    assert re.search(cause, third) and "are ranks 0, 2 of the job" in third, third
    assert "a drive of rank 1" in fourth and "are ranks 1, 3 of the job" in fourth, fourth
    assert max(waited, also) < 30, "no deadline"


ONE_RANK: dict[str, dict[str, Any]] = {
    "rank 2: clip_norm=-1 must be a number more than 0": {"clip_norm": -1},
    "rank 2: hpz=2 must be True or False": {"hpz": 2},
    "rank 2: TypeError: compression='int8': pass a zcomm.Compression": {"compression": "int8"},
    "rank 2: stage=5": {"stage": 5},
    "rank 2: mesh=7 is neither a zcomm.ProcessMesh": {"mesh": 7},
    "rank 2: comm=7 must be a zcomm Communicator": {"comm": 7},
    "rank 0 gives no memory=, but rank 2 gives memory=": {"memory": "9GiB"},
    "rank 2: compression is Compression": {"compression": zcomm.Compression(gradients="int8")},
    "rank 2: hpz is True, not False": {"hpz": True},
    "rank 2: across is micro, not step": {"across": "micro"},
    "rank 2: across='pass' must be 'step' or 'micro'": {"across": "pass"},
    "rank 2: across='micro' with a limit on memory and grad_accum=2": {
        "across": "micro",
        "memory": "9GiB",
        "grad_accum": 2,
    },
    "failed on rank 2: offload to 'nvme' needs nvme_path": {"offload": zcomm.Offload("nvme")},
    "rank 2: ZeroOptimizer has no argument 'optimizr'": {"optimizr": 1},
}


INT8 = zcomm.Compression(gradients="int8")


def refuse_on_one_rank() -> None:
    comm = zcomm.init(timeout=30)
    good = zcomm.ProcessMesh(replicate=2, shard=2)
    layer = torch.nn.Linear(4, 4)
    for text, arguments in ONE_RANK.items():
        given = {"mesh": good, "stage": 3, **(arguments if comm.rank == 2 else {})}
        with pytest.raises((ValueError, TypeError, NotImplementedError, RuntimeError)) as found:
            zcomm.ZeroOptimizer(layer, **given)
        words = str(found.value)
        assert text.removeprefix("rank 2: ").removeprefix("TypeError: ").removeprefix("failed on rank 2: ") in words
        assert comm.rank == 2 or text in words, words
    zcomm.ZeroOptimizer(layer, mesh=good).close()
    closed, other = comm.duplicate(), zcomm.ProcessMesh(comm.duplicate(), replicate=2, shard=2)
    closed.close()
    for text, wrong, mesh in (("comm= is closed", closed, None), ("comm=7 must be", 7, other)):
        with pytest.raises(ValueError, match=text) as caught:
            zcomm.ZeroOptimizer(layer, mesh=mesh, comm=wrong if comm.rank == 2 else None, compression=INT8)
        assert comm.rank == 2 or f"rank 2: {text}" in str(caught.value)


def test_a_wrong_argument_of_one_rank_is_the_error_of_all(run_ranks: Run) -> None:
    run_ranks(refuse_on_one_rank, 4)
