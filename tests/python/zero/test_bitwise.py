"""The bitwise contract: at one world size, stage, offload, bucket size, overlap and prefetch change no bit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tiers import long
from zero_jobs import Case, train_all

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
STEPS = 5


def cases(precision: str) -> list[Case]:
    grid = product((0, 1, 2, 3), (None, "cpu", "nvme"), (0.02, 25.0), (True, False))
    return [Case(stage, offload, bucket, overlap, precision) for stage, offload, bucket, overlap in grid]


def more_cases(precision: str) -> list[Case]:
    """Return cases outside the grid: other prefetch depths, and private copies of the parameters."""
    return [
        Case(3, "nvme", 0.02, True, precision, prefetch=0),
        Case(3, "nvme", 0.02, True, precision, prefetch=3),
        *(Case(stage, None, 0.02, True, precision, share_parameters=False) for stage in (1, 2, 3)),
        Case(3, "nvme", 0.02, True, precision, share_parameters=False),
        *(Case(2, "nvme", 0.02, True, precision, fraction=fraction) for fraction in (0.0, 0.3, 0.75)),
        Case(3, "nvme", 0.02, True, precision, fraction=0.5),
        Case(1, "cpu", 0.02, True, precision, fraction=0.5),
    ]


@pytest.mark.timeout_s(600)
@pytest.mark.parametrize(
    ("world_size", "precision"),
    [long(1, "fp32"), long(1, "bf16"), (2, "fp32"), (2, "bf16"), long(3, "fp32"), (3, "bf16")],
)
def test_contract(run_ranks: Run, tmp_path: Path, world_size: int, precision: str) -> None:
    """World 2 in fp32 runs all cases, each other world and precision a third: each case also runs in bf16 and at
    another size."""
    first, *others = cases(precision) + more_cases(precision)
    third = world_size + 2 * (precision == "bf16")
    all_cases = [first, *(others if (world_size, precision) == (2, "fp32") else others[third % 3 :: 3])]
    per_rank = run_ranks(train_all, world_size, all_cases, str(tmp_path), STEPS, timeout_s=560)
    for rank, results in enumerate(per_rank):
        reference = results[0]
        assert len(set(reference["losses"])) >= 2 * STEPS - 2, "the model must learn something different in each step"
        for case, result in zip(all_cases, results, strict=True):
            assert result["sizes"] == reference["sizes"]
            assert result["losses"] == reference["losses"], f"rank {rank}: losses of {case}"
            assert result["norms"] == reference["norms"], f"rank {rank}: gradient norms of {case}"
            assert result["weights"] == reference["weights"], f"rank {rank}: weights of {case}"
    assert len({results[0]["weights"] for results in per_rank}) == 1, "ranks disagree"
