"""Bytes by axis: the counts of real steps equal the plan's formulas, for each form and for pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from torch_world import world
from zcomm.demo import forms
from zcomm.demo.options import SIZES, DemoConfig
from zcomm.demo.phases import Clock
from zcomm.planning.forms import AxisBytes, Run, Shape, bubble, bytes_by_axis, local_params, meshes, parse, refusal
from zcomm.profiling.traffic import Traffic

RunRanks = Callable[..., list[Any]]
# names of calls, without numbers -> purpose in the plan
PURPOSES = {
    "gradients of bucket N": "gradients",
    "": "activations",  # torch's calls have no names
    "activations of micro-batch N for stage N": "activations",
    "gradients of micro-batch N for stage N": "activations",
    "ulysses": "heads",
    "tokens to experts": "tokens",
    "results of experts": "tokens",
    "tokens to experts, gradients": "tokens",
    "results of experts, gradients": "tokens",
    "parameters": "weights",
}
CONTROL_NBYTES = 6000  # of norms, meetings and lengths in a step
HEADER_NBYTES = 2048


def config_of(sizes: dict[str, int], options: dict[str, Any]) -> DemoConfig:
    fixed: dict[str, Any] = {"name": "", "run_dir": "", "offload": "none", "nvme_path": None, "bucket_mb": 4.0}
    fixed |= {"clip": 0.0, "overlap": True, "seed": 1, "quiet": True, "accum": 1, "stage": 2, "world_size": 1}
    shape = {**SIZES["llama"], "size": "llama", "layers": 2, "context": 16, "batch": 4, "sample_nbytes": 0}
    return DemoConfig(**{**fixed, **shape, "mesh": sizes, **options})


def sent_by(traffic: Traffic) -> dict[tuple[tuple[str, ...], str], list[float]]:
    """Return calls and bytes by axes and purpose. Calls without a purpose are small."""
    found: dict[tuple[tuple[str, ...], str], list[float]] = {}
    control: dict[tuple[str, ...], float] = {}
    for (axes, _, name), sent in traffic.rows().items():
        if name in PURPOSES:
            row = found.setdefault((axes, PURPOSES[name]), [0, 0.0])
            row[0] += sent.calls
            row[1] += sent.nbytes
        elif name.startswith("header of"):
            assert sent.nbytes == sent.calls * HEADER_NBYTES
        else:
            control[axes] = control.get(axes, 0.0) + sent.nbytes
    assert max(control.values()) < CONTROL_NBYTES, control
    return found


def compare(sizes: dict[str, int], plan: list[AxisBytes], every: list[Any]) -> None:
    """Compare counts of all ranks with the plan of the rank that sends most."""
    for each in plan:
        counts = [dict(of_rank).get((each.axes, each.purpose.split()[0]), [0, 0.0]) for of_rank in every]
        most, calls = max(nbytes for _, nbytes in counts), max(calls for calls, _ in counts)
        if each.axes and each.purpose.split()[0] in ("gradients", "weights"):  # parts of buckets are padded
            assert 0 <= most - each.nbytes < 0.03 * each.nbytes, (sizes, each, counts)
        else:
            assert (calls, most) == (each.calls, each.nbytes), (sizes, each, counts)
    known = {(each.axes, each.purpose.split()[0]) for each in plan}
    for of_rank in every:
        assert {tuple(key) for key, _ in of_rank} <= known, (sizes, of_rank, known)


def decoder(sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Return the counts of a step of the demo's decoder, and this rank's trained elements."""
    comm = zcomm.init(timeout=60)
    config = config_of(sizes, options)
    form = forms.make_form(config, comm, None)  # type: ignore[arg-type]
    mesh = form.mesh
    assert mesh is not None
    opt = zcomm.ZeroOptimizer(
        form.module, lr=1e-3, mesh=mesh, stage=config.stage, grad_accum=config.accum, precision=config.precision
    )
    for step in range(2):
        traffic = Traffic(mesh)
        with traffic:
            for micro in range(config.accum):
                rng = np.random.default_rng([form.data_rank, step, micro])
                tokens = torch.from_numpy(rng.integers(256, size=(config.batch, config.context + 1)))
                form.passes(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), Clock(opt.stats))
                opt.step()
                opt.zero_grad()
    opt.close()
    local = sum(getattr(param, "_local_tensor", param).numel() for param in form.module.parameters())
    return list(sent_by(traffic).items()), form.numel, local


def experts(sizes: dict[str, int], options: dict[str, Any]) -> Any:
    """Return the same of two layers of experts, each of which gets all tokens."""
    zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(**sizes)
    layers = [zcomm.parallel.MoE(64, lambda: nn.Linear(64, 64), 4, mesh=mesh, k=4) for _ in range(2)]
    model = nn.ModuleList(layers)
    opt = zcomm.ZeroOptimizer(model, lr=1e-3, mesh=mesh, **options)
    for _ in range(2):
        traffic = Traffic(mesh)
        with traffic:
            x = torch.ones(3, 16, 64, requires_grad=True)
            out = x
            for layer in layers:
                out = layer(out)[0]
            out.sum().backward()
            opt.step()
            opt.zero_grad()
    opt.close()
    return list(sent_by(traffic).items()), 0, sum(param.numel() for param in model.parameters())


def run_all(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[Any]:
    found = []
    with world():
        for kind, sizes, options in cases:
            found.append({"decoder": decoder, "experts": experts}[kind](sizes, options))
            zcomm.shutdown()
    return found


def plan_of(kind: str, sizes: dict[str, int], options: dict[str, Any], every: list[Any]) -> list[AxisBytes]:
    if kind == "experts":
        shape = Shape(2, 64, 1, 16, 3, experts=4, top=4, expert_params=2 * 4 * (64 * 64 + 64))
        local = local_params(sizes, shape, 2 * 4 * 64 + shape.expert_params)
        assert sum(local) == every[0][2]
        return bytes_by_axis(sizes, shape, local, Run(options["stage"], 4, 4))
    plan = forms.planned_bytes(config_of(sizes, options), every[0][1])
    counts = [local for _, _, local in every]
    scale = max(counts) / local_params(sizes, forms.shape_of(config_of(sizes, options)), every[0][1])[0]
    assert 0.99 < scale < 1.2, (sizes, counts)  # parts of a pipeline differ
    return [
        dataclasses.replace(each, nbytes=each.nbytes * scale) if each.purpose in ("gradients", "weights") else each
        for each in plan
    ]


TWO: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("decoder", {"data": 2}, {"accum": 2}),
    ("decoder", {"pipe": 2}, {}),
    ("decoder", {"tensor": 2}, {"stage": 1}),
    ("decoder", {"sequence": 2}, {"precision": "bf16"}),
    ("experts", {"expert": 2}, {"stage": 1}),
]
FOUR: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("decoder", {"data": 4}, {"stage": 0}),
    ("decoder", {"data": 2, "pipe": 2}, {"accum": 2}),
    ("decoder", {"data": 2, "tensor": 2}, {}),
    ("decoder", {"data": 2, "sequence": 2}, {}),
    ("decoder", {"pipe": 2, "tensor": 2}, {}),
    ("decoder", {"pipe": 2, "sequence": 2}, {}),
    ("decoder", {"sequence": 2, "tensor": 2}, {}),
    ("decoder", {"pipe": 4}, {"layers": 4}),
    ("experts", {"expert_data": 2, "expert": 2}, {"stage": 2}),
]


@pytest.mark.parametrize("cases", [TWO, slow(FOUR)])
def test_counts_of_a_step_are_those_of_the_plan(cases: list[Any], run_ranks: RunRanks) -> None:
    size = 1
    for number in cases[0][1].values():
        size *= number
    by_rank = run_ranks(run_all, size, cases)
    for number, (kind, sizes, options) in enumerate(cases):
        every = [of_rank[number] for of_rank in by_rank]
        compare(sizes, plan_of(kind, sizes, options, every), [sent for sent, _, _ in every])


def test_formulas_and_refusals() -> None:
    assert bubble(4, 8) == 3 / 11 and bubble(2, 4, 2) == 1 / 9
    assert parse("dp=2,pipe=4") == {"data": 2, "pipe": 4}
    for text, words in (
        ("data", "is not AXIS=RANKS"),
        ("data=2,dp=2", "comes twice"),
        ("rows=2", "axis 'rows' is not one of"),
        ("pipe=0", "1 or more"),
    ):
        with pytest.raises(ValueError, match=words):
            parse(text)
    shape = Shape(layers=4, width=64, heads=4, tokens=16, keys=2)
    assert [text for text in (refusal(sizes, shape, 1) for sizes in meshes(4, ("data", "pipe"))) if text] == []
    for sizes, words in (
        ({"pipe": 8}, "4 layers are fewer"),
        ({"tensor": 4}, "2 key heads do not divide"),
        ({"sequence": 3, "tensor": 2}, "2 heads on a rank are fewer"),
        ({"expert": 2}, "no experts"),
    ):
        assert words in refusal(sizes, shape, 1)
    assert refusal({"pipe": 2}, shape, 3) == "stage 3 with pipe: stages 0 to 2"
    assert refusal({"pipe": 2}, None, 1) == "pipe=2 needs the model's sizes" and refusal({"data": 2}, None, 3) == ""
