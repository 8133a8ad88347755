"""bench/split_batch.py: a batch in parts reads weights once per pass; its row counts results that differ."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from places import BENCH

sys.path.insert(0, str(BENCH))
from limited.split import Job, Round, distance, rows_of

PHASE = {"seconds": 2.0, "waited_s": 1.0, "read_nbytes": 3e9, "written_nbytes": 1e9}
RATES = {"read": 1e9, "written": 2e9}


def step(seconds: float, loss: float = 5.0, peak: int = 100) -> dict[str, Any]:
    return {"seconds": seconds, "loss": loss, "peak_nbytes": peak, "phases": {"forward": PHASE, "backward": PHASE}}


def end(*after: float, before: float = 0.0) -> dict[str, Any]:
    return {"numel": 10, "before": [before] * len(after), "after": [*after], "chosen": {}}


def rows(*steps: dict[str, Any], weights: dict[str, Any], limit: int | None = 100) -> list[dict[str, Any]]:
    """Return the rows of rounds in which micro-steps take 10 s, and the other variant takes ``steps``."""
    jobs = [Job(name, 1, 64, 4, limit, "") for name in ("micro-steps", "split_batch")]
    rounds = [Round(16, {"micro-steps": step(10.0), "split_batch": each}, RATES) for each in steps]
    return rows_of(rounds, {"micro-steps": end(3.0, 4.0), "split_batch": weights}, jobs)


def test_a_row_has_medians_of_rounds_and_a_roof() -> None:
    micro, split = rows(step(5.0), step(4.0), step(2.0), weights=end(3.0, 4.0))
    assert (micro["ratio"], split["ratio"], split["ratio_range"]) == (1.0, 2.5, [2.0, 5.0])
    assert split["tokens_per_s"] == 64 / 4 and split["rounds"] == 3 and split["read_nbytes"] == 6e9
    assert split["roof_tokens_per_s"] == 64 / (2 * 3.5), "two phases, each 3 s of reads and half a second of writes"
    assert micro["wrong"] == split["wrong"] == 0


@pytest.mark.parametrize(
    ("other", "weights", "limit"),
    [
        (step(4.0, loss=5.1), end(3.0, 4.0), 100),
        (step(4.0, loss=math.nan), end(3.0, 4.0), 100),
        (step(4.0, peak=101), end(3.0, 4.0), 100),
        (step(4.0), end(3.0, 5.5), 100),
        (step(4.0), end(3.0, 4.0, before=1.0), None),
    ],
)
def test_losses_weights_and_peaks_are_compared(other: dict[str, Any], weights: dict[str, Any], limit: int) -> None:
    assert rows(step(4.0), other, weights=weights, limit=limit)[1]["wrong"] == 1


def test_distance_is_relative_to_the_way_of_the_weights() -> None:
    assert distance(end(3.0, 4.0), end(3.0, 4.0)) == 0.0
    assert distance(end(3.0, 4.5), end(3.0, 4.0)) == pytest.approx(0.1)
    assert distance(end(0.0, before=1.0), end(0.0)) == math.inf


@pytest.mark.long  # test_batch_in_parts.py counts the same bytes
@pytest.mark.timeout_s(300)
def test_parts_read_less_than_micro_steps(tmp_path: Path) -> None:
    """13 layers of 0.7M parameters, with slots for three. A further micro-step reads all others twice."""
    words = ["--dir", str(tmp_path), "--json", str(tmp_path / "rows"), "--size", "9M", "--width", "256"]
    words += ["--limit", "none", "--parts", "4", "--contexts", "16", "--rounds", "2"]
    command = [sys.executable, str(BENCH / "split_batch.py"), *words, "--variants", "micro-steps,split_batch,backward"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *rounds, micro, split, backward = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert [line["kind"] for line in (machine, *rounds)] == ["machine", "round", "round"]
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]
    assert [row["variant"] for row in (micro, split, backward)] == ["micro-steps", "split_batch", "backward"]
    weights = 2 * micro["params"]  # bytes
    assert micro["read_nbytes"] - split["read_nbytes"] > 3 * 2 * weights / 2, "three micro-steps, two passes of each"
    assert split["read_nbytes"] > 5 * weights, "the state is read as well"
    assert backward["written_nbytes"] < micro["written_nbytes"] * 1.1, "no sums are stored"
    assert abs(split["written_nbytes"] / micro["written_nbytes"] - 1) < 0.1
    for row in (micro, split, backward):
        assert row["wrong"] == 0 and row["rounds"] == 2 and row["peak_nbytes"] > 0 and row["roof_tokens_per_s"] > 0
    assert 0 < split["loss_off"] < 1e-3 and 0 < split["weights_off"] < 0.1, "compared, and close"
