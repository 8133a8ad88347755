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

import zcomm
from decoder_parts import divided
from torch_world import world

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
