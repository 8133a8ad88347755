"""A norm without clipping is computed in the pass of the step: the same bits, in every stage and tier."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zcomm
from zcomm.zero.gradients.norm import Squares
from zcomm.zero.layout.flat import FlatBucket
from zero_jobs import batch, digest, groups, loss_of, small_gpt

Run = Callable[..., list[Any]]
SETTINGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2},
    {"stage": 3, "bucket_mb": 0.02},
    {"stage": 1, "offload": "nvme"},
    {"stage": 3, "offload": zcomm.Offload("nvme", "nvme", update="step")},
    {"stage": 2, "precision": "bf16"},
    {"stage": 2, "optimizer": "lion"},
    {"stage": 1, "optimizer": "sgd"},
    {"stage": 2, "optimizer": torch.optim.NAdam},
    {"stage": 2, "state_dtype": torch.uint8},
    {"stage": 1, "precision": "bf16", "state_dtype": torch.bfloat16},
    {"stage": 2, "precision": "bf16", "optimizer": torch.optim.RMSprop},
    {"stage": 2, "groups": True},
]


def norms(setting: dict[str, Any], folder: str, clip_norm: float | None) -> tuple[list[str], str, int]:
    """Return the norms of some steps, the bits of the weights, and the number of gradient reads only for the norm."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    given = dict(setting)
    optimizer: Any = given.pop("optimizer", "adamw")
    if given.pop("groups", False):
        optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    else:
        given["lr"] = 1e-3
    if "offload" in given:
        given["nvme_path"] = folder
    opt = zcomm.ZeroOptimizer(model, optimizer, clip_norm=clip_norm, **given)
    reads, add = 0, Squares.add

    def counted(squares: Squares, bucket: FlatBucket, shard: torch.Tensor) -> None:
        nonlocal reads
        reads += 1
        add(squares, bucket, shard)

    Squares.add = counted  # type: ignore[method-assign]
    try:
        found = []
        for step in range(4):
            loss_of(model, *batch(comm.rank, step)).backward()
            opt.step()
            found.append(float(opt.grad_norm).hex())
            opt.zero_grad()
    finally:
        Squares.add = add  # type: ignore[method-assign]
    weights = digest(opt.full_state_dict())
    opt.close()
    return found, weights, reads


def both(folder: str) -> list[tuple[Any, ...]]:
    return [(norms(setting, folder, None), norms(setting, folder, 1e30)) for setting in SETTINGS]


@pytest.mark.parametrize("world_size", [1, 2])
def test_norm_of_the_step_is_the_norm_before_it(run_ranks: Run, tmp_path: Any, world_size: int) -> None:
    for found in run_ranks(both, world_size, str(tmp_path)):
        for setting, (inside, before) in zip(SETTINGS, found, strict=True):
            assert inside[:2] == before[:2], setting
            assert before[2] > 0, setting
            assert inside[2] == 0, setting


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def not_finite() -> list[str]:
    comm = zcomm.init(timeout=60)
    heard = Heard()
    logging.getLogger("zcomm").addHandler(heard)
    model = torch.nn.Linear(64, 64)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2)
    out = model(torch.ones(1, 64)).sum()
    (out * (math.inf if comm.rank == 1 else 1.0)).backward()
    opt.step()
    assert not math.isfinite(opt.grad_norm)
    opt.close()
    return heard.lines


def test_what_is_not_finite_is_told(run_ranks: Run) -> None:
    lines = run_ranks(not_finite, 2)[0]
    assert any("weight" in line for line in lines), lines
