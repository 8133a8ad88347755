"""Models of transformers under tensor parallelism: the gradients of whole models, and the words of all plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run

pytestmark = pytest.mark.needs("transformers")
ROUTED_IN_FP32 = ("mixtral", "deepseek_v2", "granitemoe_swa", "qwen3_moe", "sarvam_moe")  # softmax of routers


def test_plans_of_transformers_divide_models_exactly(tmp_path: Path) -> None:
    from zcomm.parallel.styles import REFUSED, STYLES

    first, second = run("tensor_plans", tmp_path)
    for result in (first, second):
        for kind, worst in result["exact"].items():
            assert worst < (1e-6 if kind in ROUTED_IN_FP32 else 1e-9), (kind, worst)
        assert max(result["zero"]) < 1e-5
    assert first["words"] and set(first["words"]) <= {*STYLES, *REFUSED}
