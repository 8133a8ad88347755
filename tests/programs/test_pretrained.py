"""transformers' from_pretrained under zcomm: the weights of a plain one, with no weight in memory before its use."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run

pytestmark = pytest.mark.needs("transformers", "accelerate")
CASES = "same bf16 to_bf16 to_fp32 parts tied base head renamed experts".split()
# Conversions run in threads outside of zero.Init. Merging tensors of the file makes a new tensor. Ranks share tensors
# that the file lacks.
IN_MEMORY = {"init": {"experts"}, "plain": {"to_bf16", "to_fp32", "experts"}, "deepspeed": {"experts"}}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", IN_MEMORY)
def test_from_pretrained(tmp_path: Path, way: str, ranks: int) -> None:
    for result in run("pretrained", tmp_path, way, *CASES, ranks=ranks):
        assert not result["wrong"]
        found = {case for case, nbytes in result["real"].items() if nbytes}
        assert found <= IN_MEMORY[way], result["real"]
