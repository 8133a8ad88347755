"""bench/adam.py as a program: each variant's result is checked; rows have peers and roof, or a line names the cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from places import BENCH

pytestmark = pytest.mark.slow


def test_small_run(tmp_path: Path) -> None:
    file, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
    flags = ["--count", "20001", "--rounds", "7", "--json", str(file), "--page", str(page)]
    done = subprocess.run(
        [sys.executable, str(BENCH / "adam.py"), "step", *flags], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *rows = (json.loads(line) for line in file.read_text().splitlines())
    assert machine["kind"] == "machine" and str(tmp_path) not in file.read_text() + page.read_text()
    assert len(rows) == 4
    for row in rows:
        assert row["time_ms"]["zcomm"] > 0 and not any(row["wrong"].values())
        assert "torch_fused" in row["time_ms"] or row["kind"] == "fp32 weight, small state"
        assert len(row["rounds_ms"]["zcomm"]) == 7
    assert "# CPU Adam" in page.read_text() and "torch fused" in page.read_text()


def test_reference_tells_a_wrong_step() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        import torch

        from optim.reference import AdamW, count_wrong
    finally:
        sys.path.remove(str(BENCH))
    start, grad, adam = torch.randn(1000), torch.randn(1000), AdamW()
    good = adam.after(start.double(), grad.double()).float()
    assert count_wrong(good, start, grad, adam, 0.0) == 0
    bad = good.clone()
    bad[7] += 1e-5
    bad[8] = float("nan")
    assert count_wrong(bad, start, grad, adam, 0.0) == 2


def test_reference_allows_8_bits_by_magnitude() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        import torch

        from optim.reference import coded_slack
    finally:
        sys.path.remove(str(BENCH))
    slack = coded_slack(torch.tensor([1.0, -0.1, 2.0**-5, 2.0**-13, 0.0]).double())
    assert slack.tolist() == pytest.approx([0.04, 0.04, 0.08, 0.32, 1.0])
    assert coded_slack(torch.zeros(3).double()).tolist() == pytest.approx([0.04] * 3)
