"""Forms in pairs and all together: losses, gradients and norms are those of the whole model on one rank.

In float64 there is no ZeroOptimizer: a pipeline adds gradients up, else the test does. In fp32 ZeroOptimizer does it,
and clips. Sizes are odd: 7 tokens, 5 samples in 3 micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from decoder_parts import Parts, batch, divided, layers, loss_of, of_rank, whole_tensor
from tiers import long, slow
from torch_world import world
from zcomm.zero.groups.mesh_comms import is_expert

Run = Callable[..., list[Any]]
Case = dict[str, Any]
SUMMED = ("data", "replicate", "expert_data", "sequence", "expert")


def reduce(parts: Parts) -> None:
    """Add gradients up as ZeroOptimizer does, for a model without a pipeline."""
    mesh = parts.mesh
    every = [axis for axis in mesh.axes if axis in SUMMED]
    same, others = mesh.comm(*every, use="test"), mesh.comm(*(axis for axis in every if axis != "expert"), use="test")
    for param in parts.module.parameters():
        assert param.grad is not None
        grad = getattr(param.grad, "_local_tensor", param.grad)
        (others if is_expert(param) else same).all_reduce(grad)
        grad /= parts.replicas


def exact(case: Case) -> None:
    """Train in float64 by plain gradient descent, and compare gradients with the whole model's in each step."""
    parts = divided(case["mesh"], case.get("experts", False), torch.float64, case.get("schedule", "1f1b"))
    whole = layers(case.get("experts", False)).double()
    for step in range(case["steps"]):
        wanted = torch.zeros(())
        for replica in range(parts.replicas):
            x, y = batch(step * parts.replicas + replica)
            loss = loss_of(whole(x), y) / parts.replicas
            loss.backward()
            wanted = wanted + loss.detach()
        found = parts.passes(step)
        assert abs(float(found) - float(wanted)) < 1e-9, (step, found, wanted)
        if parts.pipe is None:
            reduce(parts)
        grads = of_rank({n: p.grad for n, p in whole.named_parameters() if p.grad is not None}, parts)
        for name, param in parts.module.named_parameters():
            assert param.grad is not None, name
            grad = whole_tensor(param.grad)
            assert float((grad - grads.get(name, torch.zeros(()))).abs().max()) < 1e-9, (step, name)
        with torch.no_grad():
            for param in (*parts.module.parameters(), *whole.parameters()):
                if param.grad is not None:
                    param -= 0.1 * param.grad
                    param.grad = None
    if parts.pipe is not None:
        parts.pipe.close()


def with_zero(case: Case) -> None:
    """Train in fp32 by ZeroOptimizer, with clipping and accumulation; compare losses, norms and weights."""
    accum, clip = case.get("accum", 1), case.get("clip", 0.3)
    parts = divided(case["mesh"], case.get("experts", False), torch.float32, case.get("schedule", "1f1b"))
    whole = layers(case.get("experts", False))
    options = {"lr": 0.1, "momentum": 0.9, "clip_norm": clip, "grad_accum": accum, "bucket_mb": 0.002}
    opt = zcomm.ZeroOptimizer(parts.module, "sgd", mesh=parts.mesh, stage=case["stage"], **options)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(case["steps"]):
        for micro in range(step * accum, (step + 1) * accum):
            wanted = 0.0
            for replica in range(parts.replicas):
                x, y = batch(micro * parts.replicas + replica)
                loss = loss_of(whole(x), y) / parts.replicas
                (loss / accum).backward()
                wanted += loss.item()
            found = float(parts.passes(micro))
            assert abs(found - wanted) < 1e-5, (step, found, wanted)
            opt.step()
            opt.zero_grad()
        norm = float(nn.utils.clip_grad_norm_(whole.parameters(), clip))
        assert opt.grad_norm == pytest.approx(norm, rel=1e-5), step
        reference.step()
        reference.zero_grad()
    weights = of_rank(whole.state_dict(), parts)
    for name, param in parts.module.named_parameters():
        value = zcomm.zero.full_param(param) if case["stage"] == 3 else whole_tensor(param.detach())
        assert float((value - weights[name]).abs().max()) < 1e-5, name
    opt.close()
    if parts.pipe is not None:
        parts.pipe.close()


def run_all(cases: list[Case]) -> None:
    with world():
        for case in cases:
            try:
                (exact if case.get("stage") is None else with_zero)(case)
            except Exception as error:
                raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
            finally:
                zcomm.shutdown()


# mesh, with experts, stages that the pair has. In the fast level two stages of few pairs.
PAIRS: list[tuple[dict[str, int], bool, tuple[int, ...]]] = [
    ({"data": 2, "pipe": 2}, False, (0, 1, 2)),
    ({"data": 2, "tensor": 2}, False, (0, 1, 2)),
    ({"data": 2, "sequence": 2}, False, (0, 1, 2, 3)),
    ({"expert_data": 2, "expert": 2}, True, (0, 1, 2, 3)),
    ({"pipe": 2, "tensor": 2}, False, (0, 1, 2)),
    ({"pipe": 2, "sequence": 2}, False, (0, 1, 2)),
    ({"pipe": 2, "expert": 2}, True, (0, 1, 2)),
    ({"sequence": 2, "tensor": 2}, False, (0, 1, 2)),
    ({"sequence": 2, "expert": 2}, True, (0, 1, 2, 3)),
    ({"expert": 2, "tensor": 2}, True, (0, 1, 2)),
]
EIGHT: list[tuple[dict[str, int], bool, tuple[int, ...]]] = [
    ({"data": 2, "pipe": 2, "tensor": 2}, False, (1,)),
    ({"pipe": 2, "sequence": 2, "tensor": 2}, False, (2,)),
    ({"expert_data": 2, "pipe": 2, "expert": 2}, True, (1,)),
    ({"pipe": 2, "expert": 2, "tensor": 2}, True, (0,)),
]


def cases_of(sizes: dict[str, int], experts: bool, stages: tuple[int | None, ...], steps: int) -> list[Case]:
    return [
        {"mesh": sizes, "experts": experts, "stage": stage, "steps": steps, "accum": 1 + (stage or 0) % 2}
        for stage in stages
    ]


FAST = [
    *cases_of({"pipe": 2, "tensor": 2}, False, (1,), 3),
    *cases_of({"pipe": 2, "expert": 2}, True, (None, 2), 3),
    *cases_of({"sequence": 2, "tensor": 2}, False, (1,), 3),
]


def name_of(cases: list[Case]) -> str:
    return "-".join(["fast" if cases is FAST else "zero" if cases[0]["stage"] is not None else "", *cases[0]["mesh"]])


@pytest.mark.parametrize(
    "cases",
    [
        FAST,
        *(slow(cases_of(sizes, experts, (None, stages[-1]), 20)) for sizes, experts, stages in PAIRS),
        *(long(cases_of(sizes, experts, stages[:-1], 20)) for sizes, experts, stages in PAIRS),
        *(slow(cases_of(sizes, experts, (None, *stages), 3)) for sizes, experts, stages in EIGHT),
    ],
    ids=name_of,
)
def test_forms_train_together_as_one_rank(cases: list[Case], run_ranks: Run) -> None:
    run_ranks(run_all, math.prod(cases[0]["mesh"].values()), cases)
