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
