"""TRL with deepspeed=: SFT and DPO have the losses of one process; GRPO generates under stage 3 as under stage 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("trl", "transformers", "accelerate", "datasets")


@pytest.mark.parametrize(("what", "stage", "tier"), [slow("sft", 2, "cpu"), ("sft", 3, "none"), ("dpo", 3, "cpu")])
def test_losses_are_those_of_one_process(folder: Path, what: str, stage: int, tier: str) -> None:
    (wanted,) = run("trl_train", folder, what, "--batch", 4, ranks=0)
    for result in run("trl_train", folder, what, "--batch", 2, "--stage", stage, "--tier", tier):
        for name in ("losses", "norms"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-5), name


def test_grpo_generates_the_same_in_stage_3_as_in_stage_0(folder: Path) -> None:
    wanted = run("trl_train", folder, "grpo", "--batch", 4, "--stage", 0)
    found = run("trl_train", folder, "grpo", "--batch", 4, "--stage", 3)
    assert all(reward > 0 for reward in wanted[0]["rewards"])
    for one, other in zip(wanted, found, strict=True):
        assert one["rewards"] == other["rewards"]
        for name in ("losses", "norms", "kl"):
            assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name
