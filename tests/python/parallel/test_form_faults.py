"""Faults of forms in pairs: a killed rank is named with its axes on all others, and refusals are one error of all."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from decoder_parts import divided
from torch_world import world
from zcomm.parallel import ulysses

Run = Callable[..., list[Any]]


def killed(sizes: dict[str, int], experts: bool, dead: int) -> str:
    """Train, and end rank ``dead`` by a signal before the third step. Returns: the error of this rank."""
    with world():
        parts = divided(sizes, experts, torch.float32)
        opt = zcomm.ZeroOptimizer(parts.module, "sgd", lr=0.1, mesh=parts.mesh, stage=1)
        for step in range(2):
            parts.passes(step)
            opt.step()
            opt.zero_grad()
        if parts.mesh.world.rank == dead:
            list(parts.module.modules())[-1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            parts.passes(2)
            opt.step()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            text = "no error"
        return text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "experts"),
    [
        ({"data": 2, "tensor": 2}, False),
        ({"pipe": 2, "tensor": 2}, False),
        ({"sequence": 2, "tensor": 2}, False),
        ({"pipe": 2, "expert": 2}, True),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_killed_rank_is_named(sizes: dict[str, int], experts: bool, run_ranks: Run) -> None:
    start = time.monotonic()
    results = run_ranks(killed, 4, sizes, experts, 3, check=False, timeout_s=80.0)
    assert results[3].exitcode == -signal.SIGKILL
    for result in results[:3]:
        text = result.value or (result.error.message if result.error else "")
        assert "PeerLost" in text, result.describe()
        # A rank of other axes may wait for one that has left because of its own error.
        assert re.search(r"rank 3 died|rank 1 died.* are ranks \d, 3 of the job|rank 1 left", text), text
        if "rank 3" not in text:  # counted along the axis, which is named
            assert re.search(r"mesh axes (data|sequence|expert)|group \"mesh_tensor\"", text), text
        if "pipe" in sizes:
            assert "pipeline step 3" in text and "micro-batch" in text and "lost: stage 1 (rank 3)" in text, text
    assert time.monotonic() - start < 80


def refusals() -> dict[str, str]:
    """Return the errors of pairs that cannot work, by case."""
    found: dict[str, str] = {}

    def refused(case: str, call: Callable[[], object]) -> None:
        try:
            call()
            found[case] = "no error"
        except (ValueError, NotImplementedError, RuntimeError) as error:
            found[case] = f"{type(error).__name__}: {error}"

    with world():
        parts = divided({"pipe": 2, "tensor": 2}, False, torch.float32)
        build = zcomm.ZeroOptimizer
        refused("pipe x tensor, stage 3", lambda: build(parts.module, lr=0.1, mesh=parts.mesh, stage=3))
        refused("sequence of 3 heads", lambda: ulysses_of_heads(3))
        tied = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False))
        tied[2].weight = tied[0].weight
        zcomm.parallel.tensor(tied, parts.mesh, {"0": "embedding_rowwise", "2": "colwise_rep"})
        refused(
            "a tied weight in parts",
            lambda: zcomm.parallel.pipeline(tied, parts.mesh, 2, loss=nn.functional.mse_loss, cut=[0, 1, 3]),
        )
        zcomm.shutdown()
        parts = divided({"pipe": 2, "expert": 2}, True, torch.float32)
        opt = zcomm.ZeroOptimizer(parts.module, "sgd", lr=0.1, mesh=parts.mesh, stage=3)
        refused("pipe x expert, stage 3", lambda: parts.passes(0))
        opt.close()
        zcomm.shutdown()
    return found


def ulysses_of_heads(heads: int) -> torch.Tensor:
    attend = ulysses(nn.functional.scaled_dot_product_attention, zcomm.ProcessMesh(sequence=4))
    return attend(*torch.ones(3, 1, heads, 2, 4).unbind(0))  # type: ignore[no-any-return]


REFUSED = {
    "pipe x tensor, stage 3": r"NotImplementedError: stage=3 with the DTensor \d\.q\.weight",
    "sequence of 3 heads": "ValueError: ulysses: 3 attention heads cannot be divided among 4 ranks",
    "a tied weight in parts": r"ValueError: pipeline: stage 0 \(rank 0\): 0.weight is shared by stages, and divided",
    "pipe x expert, stage 3": r"ValueError: pipeline: stage 0 \(rank 0\): a pipeline's ZeroOptimizer has stage 0, 1 or",
}


@pytest.mark.slow
def test_pairs_that_cannot_work_are_one_error_on_all_ranks(run_ranks: Run) -> None:
    for found in run_ranks(refusals, 4):
        assert found.keys() == REFUSED.keys()
        for case, words in REFUSED.items():
            assert re.match(words, found[case]), (case, found[case])
