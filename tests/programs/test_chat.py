"""RLHF by DeepSpeed's calls, in ZeRO stage 3 with offload: losses of torch, tokens of resident models, equal ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize(
    ("stage", "tier", "hybrid"), [(3, "nvme", True), slow(3, "cpu", True), slow(3, "nvme", False), slow(2, "cpu", True)]
)
def test_three_steps(folder: Path, stage: int, tier: str, hybrid: bool) -> None:
    ranks = run("chat", folder, "--stage", stage, "--tier", tier, *(["--hybrid"] if hybrid else []))
    for result in ranks:
        for step in ("sft", "reward"):
            ours, torchs = result[step]["losses"]
            assert ours == pytest.approx(torchs, rel=1e-5), step
            assert result[step]["difference"] < 1e-5, step
        ppo = result["ppo"]
        assert all(math.isfinite(loss) for losses in ppo["losses"] for loss in losses)
        assert ppo["changed"] > 1e-3 and ppo["ema"] < 1e-6
        assert ppo["sums"] == ranks[0]["ppo"]["sums"], "weights differ between ranks"
    assert (ranks[0]["ppo"]["lengths"] == ranks[1]["ppo"]["lengths"]) is not hybrid
