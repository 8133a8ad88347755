"""Blocks with experts of transformers, divided by the configuration's "expert_parallel": losses of undivided ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize("kind", ["mixtral", slow("qwen3_moe"), slow("deepseek_v2"), slow("deepseek_v3")])
def test_blocks_with_divided_experts(kind: str, tmp_path: Path) -> None:
    divided, whole = run("experts", tmp_path, kind, "--divide"), run("experts", tmp_path, kind)
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine["experts"] * 2 == theirs["experts"]
        assert mine["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert mine["norms"] == pytest.approx(theirs["norms"], rel=1e-4)
