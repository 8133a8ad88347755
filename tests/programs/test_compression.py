"""deepspeed.compression with models of transformers: exported and cleaned models load by from_pretrained."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run

pytestmark = pytest.mark.needs("transformers")


def test_exported_and_cleaned_models_are_loaded_with_equal_outputs(tmp_path: Path) -> None:
    for result in run("compressed", tmp_path, ranks=2):
        for name in ("bert", "llama"):
            found = result[name]
            assert found["exported"] and found["saved"] and found["near"] < 1e-5, (name, found)
            assert found["numel"][1] < found["numel"][0]
