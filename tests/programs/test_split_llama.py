"""split_batch of transformers' decoder layers: the bits of a loop by hand, also with padding; no key/value cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("transformers")


@pytest.mark.parametrize("ranks", [1, slow(2)])
def test_llama_in_parts(tmp_path: Path, ranks: int) -> None:
    for result in run("split_llama", tmp_path, ranks=ranks):
        for padded in ("False", "True"):
            found = result[padded]
            assert found["same"] and len(set(found["losses"])) == 3, found
            assert "DynamicCache" in found["refused"] and "use_cache=False" in found["refused"]
