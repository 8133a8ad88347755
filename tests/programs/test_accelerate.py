"""Accelerate's loop on two ranks: a schedule of the program, dummy ones, and saving in mid-accumulation."""

from __future__ import annotations

from pathlib import Path

import pytest

from running import run
from tiers import slow

pytestmark = pytest.mark.needs("accelerate")


@pytest.mark.parametrize(
    ("stage", "tier", "options"),
    [
        slow(2, "none", ()),
        (3, "cpu", ()),
        (2, "cpu", ("--dummy",)),
        slow(3, "none", ("--dummy",)),
        slow(2, "none", ("--save", 2)),
        (3, "none", ("--save", 3, "--load", 7)),
    ],
)
def test_loop(tmp_path: Path, stage: int, tier: str, options: tuple[str | int, ...]) -> None:
    (wanted,) = run("accelerate_loop", tmp_path, "--batch", 8, *options, ranks=0)
    for result in run("accelerate_loop", tmp_path, "--batch", 4, "--stage", stage, "--tier", tier, *options):
        for name in ("losses", "rates"):
            assert result[name] == pytest.approx(wanted[name], rel=1e-5), name
        if result["rank"] == 0:
            assert result["weights"].keys() == wanted["weights"].keys()
            for name, value in wanted["weights"].items():
                assert result["weights"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
