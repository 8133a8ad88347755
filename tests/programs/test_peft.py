"""PEFT's LoRA by the Trainer with deepspeed=: losses of one process, parameters counted, the adapter reloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("peft", "transformers", "accelerate")


@pytest.mark.parametrize(("stage", "tier"), [slow(2, "none"), (3, "nvme")])
def test_lora(folder: Path, stage: int, tier: str) -> None:
    (wanted,) = run("peft_lora", folder, "--batch", 4, ranks=0)
    for result in run("peft_lora", folder, "--batch", 2, "--stage", stage, "--tier", tier):
        assert result["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert (result["trainable"], result["everything"]) == (wanted["trainable"], wanted["everything"])
        if result["rank"] == 0:
            assert result["after"] == pytest.approx(wanted["after"], rel=1e-5)
