"""Blocks with experts of transformers, divided by the configuration's "expert_parallel": losses of undivided ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from running import SCRIPTS, run
from tiers import slow

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize("kind", ["mixtral", slow("qwen3_moe"), slow("deepseek_v2"), slow("deepseek_v3")])
def test_blocks_with_divided_experts(kind: str, tmp_path: Path) -> None:
    stage = 3 if kind == "qwen3_moe" else 2
    divided = run("experts", tmp_path, kind, "--divide", "--stage", stage)
    whole = run("experts", tmp_path, kind, "--stage", stage)
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine["experts"] * 2 == theirs["experts"]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
        assert all(mine["saved"].values()), mine["saved"]
    assert len(divided[0]["saved"]) == 6


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("stage", [slow(2), slow(3)])
def test_trainer_saves_and_resumes_divided_experts(stage: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPTS / "tiny.py"), str(tmp_path / "model"), "mixtral"], check=True)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/model").symlink_to(tmp_path / "model")
    (wanted,) = run("trainer", tmp_path / "one", "--batch", 4, ranks=0)
    setting = ("--batch", 2, "--stage", stage, "--experts", 2)
    run("trainer", tmp_path, *setting, "--steps", 4)
    results = run("trainer", tmp_path, *setting, "--resume")
    for result in results:
        for name in ("losses", "norms", "evaluations", "final"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-5), name
    assert results[0]["reloaded"] == pytest.approx(results[0]["final"], rel=1e-5)
