"""Checkpoints of parts: each name once, whole; they load with any mesh, equal to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zcomm
from tensor_jobs import PLAN, Net, loss_of, whole
from torch_world import world
from zcomm.zero.checkpoint.export import export
from zcomm.zero.layout.cut import Cut

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("shape", [(4,), (4, 3), (3, 4, 5), (8, 1), (12, 7), (2, 4, 0)])
def test_cuts_are_the_elements_of_narrow(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape))
    for dim, count, blocks, most in itertools.product(range(len(shape)), (1, 2, 4), (1, 2, 3), (1, 5, 8, 1000)):
        if shape[dim] % (count * blocks):
            continue
        made, at = torch.full_like(tensor, -1), 0
        cuts = [Cut(torch.Size(shape), dim, index, count, blocks) for index in range(count)]
        parts = [cut.part_of(tensor.view(shape)).reshape(-1) for cut in cuts]
        for spans in zip(*(cut.spans(most) for cut in cuts), strict=True):
            size, _, alternate = spans[0]
            assert all(span[0] == size and span[2] == alternate for span in spans)
            for cut, part, (_, mine, _) in zip(cuts, parts, spans, strict=True):
                if mine is not None and alternate:
                    cut.place(made[at : at + size], part[mine])
                elif mine is not None:
                    made[at : at + size] = part[mine]
            at += size
        assert torch.equal(made, tensor)
        for cut, part in zip(cuts, parts, strict=True):
            for begin, end in itertools.combinations(range(part.numel() + 1), 2):
                read = cut.read(slice(begin, end), lambda low, high: tensor[low:high])
                assert torch.equal(read, part[begin:end]), (cut, begin, end)


def build(sizes: Mapping[str, int], rank: int, precision: str) -> tuple[Net, zcomm.ZeroOptimizer]:
    mesh = zcomm.ProcessMesh(**sizes)
    model = Net(rank)
    if mesh.size("tensor") > 1:
        zcomm.parallel.tensor(model, mesh, PLAN)
    model.layers[1].up.weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    model.layers[1].norm.weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    stage = 1 if mesh.size("tensor") > 1 else 2
    return model, zcomm.ZeroOptimizer(model, "adamw", lr=0.01, mesh=mesh, stage=stage, precision=precision)


def values(opt: zcomm.ZeroOptimizer) -> dict[str, Any]:
    found: dict[str, Any] = dict(opt.full_state_dict())
    state = opt.state_dict()["state"]
    return found | {f"{key} of {number}": value for number, entry in state.items() for key, value in entry.items()}


def step(model: Net, opt: zcomm.ZeroOptimizer, number: int) -> None:
    loss_of(model, number).backward()
    opt.step()
    opt.zero_grad()


def saved(folder: str, sizes: dict[str, int], precision: str) -> dict[str, Any]:
    with world() as (rank, _):
        zcomm.init(timeout=60)
        model, opt = build(sizes, rank, precision)
        for number in range(3):
            step(model, opt, number)
        opt.save(f"{folder}/first", client_state={"step": 3})
        found = values(opt)
        background = opt.save(f"{folder}/second", wait=False)
        step(model, opt, 3)
        background.wait()
        piece = {f"{each.name} {each.begin}": each.shape for each in opt.iter_state("weight")}
        weight = model.head.weight
        ones = torch.ones(weight.shape)
        zcomm.zero.set_full_param(weight, ones * 2)
        zcomm.zero.set_full_optim_state(weight, ones, "exp_avg")
        assert torch.equal(zcomm.zero.full_param(weight), ones * 2)
        assert torch.equal(zcomm.zero.full_optim_state(weight, "exp_avg"), ones)
        assert torch.equal(whole(weight.detach()).float(), ones * 2)
        loss_of(model, 4).backward()
        grad = zcomm.zero.full_grad(weight)
        assert grad is not None and grad.shape == weight.shape
        zcomm.zero.set_full_grad(weight, ones)
        assert torch.equal(zcomm.zero.full_grad(weight), ones)  # type: ignore[arg-type]
        state = opt.state_dict()
        opt.load_state_dict(state)
        again = opt.state_dict()
        for number, entry in state["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, again["state"][number][key]), (number, key)
        opt.close()
        zcomm.shutdown()
    assert rank or piece["head.weight 0"] == torch.Size((12, 7))
    return found


def loaded(folder: str, sizes: dict[str, int], precision: str) -> dict[str, Any]:
    with world() as (rank, _):
        zcomm.init(timeout=60)
        model, opt = build(sizes, rank + 9, precision)
        assert opt.load(f"{folder}/second") is None
        second = values(opt)
        assert opt.load(f"{folder}/first") == {"step": 3}
        found = values(opt)
        assert all(torch.equal(second[name], value) for name, value in found.items())
        zcomm.zero.set_full_param(model.head.weight, torch.zeros(model.head.weight.shape))
        zcomm.zero.load_weights(opt, f"{folder}/first")
        weights = opt.full_state_dict()
        assert all(torch.equal(weights[name], found[name]) for name in weights)
        step(model, opt, 3)
        opt.close()
        zcomm.shutdown()
    return found


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_checkpoint_of_parts_loads_with_any_mesh(run_ranks: Run, tmp_path: Path, precision: str) -> None:
    wanted = run_ranks(saved, 4, str(tmp_path), {"data": 2, "tensor": 2}, precision)[0]
    meshes: list[dict[str, int]] = [{"tensor": 1}, {"tensor": 2}, {"data": 1, "tensor": 4}]
    for sizes in meshes[: 2 if precision == "bf16" else 3]:
        for found in run_ranks(loaded, math.prod(sizes.values()), str(tmp_path), sizes, precision):
            assert found.keys() == wanted.keys()
            differ = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
            assert not differ, (sizes, differ)
    (file,) = export(tmp_path / "first", tmp_path / "model.safetensors")
    tensors = load_file(file)
    assert all(torch.equal(tensors[name].float(), wanted[name].float()) for name in Net(0).state_dict())


def test_a_checkpoint_of_one_rank_loads_into_parts(run_ranks: Run, tmp_path: Path) -> None:
    (wanted,) = run_ranks(saved, 1, str(tmp_path), {"tensor": 1}, "fp32")
    for found in run_ranks(loaded, 2, str(tmp_path), {"tensor": 2}, "fp32"):
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
