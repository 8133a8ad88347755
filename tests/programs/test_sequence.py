"""Sequences divided by Accelerate and Trainer, with DeepSpeed's names: losses, norms and evaluation of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("transformers", "accelerate")


@pytest.mark.parametrize(
    ("by", "stage"), [("trainer", 2), slow("trainer", 3), slow("accelerate", 1), ("accelerate", 3)]
)
def test_two_ranks_train_as_one(tmp_path: Path, by: str, stage: int) -> None:
    (wanted,) = run("sequence", tmp_path, by, ranks=0)
    for result in run("sequence", tmp_path, by, "--stage", stage):
        for name in wanted.keys() - {"rank"}:
            assert result[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_parts_of_models_have_the_gradients_of_the_whole(tmp_path: Path) -> None:
    words = ["without position_ids=", "begins at position 0 on rank 1", "type linear_attention", "attention 'eager'"]
    for result in run("parts", tmp_path):
        assert result["worst"] < 1e-12
        assert len(result["said"]) == len(words)
        for said, word in zip(result["said"], words, strict=True):
            assert word in said
