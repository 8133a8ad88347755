"""bench/limit.py: its rows, which show that a memory limit holds at any depth and changes no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from places import BENCH

sys.path.insert(0, str(BENCH))
from limited import save
from limited.bits import wrong
from limited.bound import bound_of
from limited.depth import parse_count, refused
from limited.ranks import Failed
from limited.training import Found, Training, layers_for, run

FIO = """
import json, sys
kind = next(word for word in sys.argv if word.startswith("--rw=")).removeprefix("--rw=")
moved = {"read": [1, 0], "write": [0, 1], "rw": [0.5, 0.5]}[kind]
job = {what: {"io_bytes": int(1e9 * part)} for what, part in zip(("read", "write"), moved)}
print("a note", json.dumps({"jobs": [{**job, "job_runtime": 500}]}))
"""


def rows(
    case: str, folder: Path, *words: str, timeout_s: float = 400.0, status: Collection[int] = (0,)
) -> list[dict[str, Any]]:
    """Run a case; return its lines except the machine's. status: the allowed exit codes."""
    drive, out = folder / "drive", folder / "rows"
    drive.mkdir()
    command = [sys.executable, str(BENCH / "limit.py"), case, "--dir", str(drive), "--json", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=dict(os.environ), check=False)
    assert done.returncode in status, done.stdout + done.stderr
    assert not list(drive.iterdir()), "a run leaves nothing on the drive"
    machine, *found = map(json.loads, out.read_text().splitlines())
    assert machine["kind"] == "machine" and str(folder) not in json.dumps(machine)
    return found


def test_numbers_of_parameters() -> None:
    assert [parse_count(text) for text in ("3B", "100M", "5e6")] == [3e9, 1e8, 5e6]
    for text in ("", "B", "many", "0"):
        with pytest.raises(ValueError, match="parameters"):
            parse_count(text)
    assert layers_for(1e8, 1024) == 9 and layers_for(3e9, 2048) == 68 and layers_for(1, 64) == 1


def test_losses_and_digests_that_differ_are_counted() -> None:
    one = [Found(losses=["a", "b"], digest="d"), Found(rank=1, losses=["c", "d"])]
    assert wrong(one, one) == 0
    assert wrong(one, [Found(losses=["a", "x"], digest="e"), one[1]]) == 2


def test_a_checkpoint_that_came_back_otherwise_is_counted() -> None:
    state = {"a weight": "1", "a master": "2"}
    first = [{"saved": state, "stepped": {"a weight": "3"}, "loss": "x"}]
    second = [{**first[0], "exported": {"a weight": "1"}}]
    assert save.compare(first, second) == 0
    for key, value in (
        ("loss", "y"),
        ("exported", {}),
        ("exported", {"a weight": "3"}),
        ("stepped", {}),
        ("saved", {}),
    ):
        assert save.compare(first, [{**second[0], key: value}]) > 0, key


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_phases_of_a_save_and_a_load(tmp_path: Path) -> None:
    found = rows("save", tmp_path, "--sizes", "3M", "--width", "256", "--ranks", "2", "--steps", "2")
    trained = ["construct", "step 1", "step 2", "save", "digest", "step 3", "close"]
    assert [row["phase"] for row in found] == [*trained, "construct", "load", "digest", "step 3", "close", "export"]
    assert all(row["wrong"] == 0 and row["kept"] and row["seconds"] > 0 for row in found)
    assert found[3]["written_nbytes"] > 12 * found[3]["params"] > 0, "weights, masters and AdamW's state"


def test_a_bound_is_the_larger_of_computing_and_the_drive_in_each_phase() -> None:
    def phase(seconds: float, waited_s: float, read: float, written: float) -> dict[str, float]:
        return {"seconds": seconds, "waited_s": waited_s, "read_nbytes": read, "written_nbytes": written}

    step = {"forward": phase(5.0, 1.0, 2e9, 0.0), "backward": phase(9.0, 8.0, 4e9, 2e9), "step": phase(0.5, 0.5, 0, 0)}
    rates = [{"forward": 2e9, "backward": 1e9}, {"forward": 1e9, "backward": 2e9}]
    assert bound_of([step], rates) == 4.0 + 3.0, "computing, then the drive at the better of two rates"
    assert bound_of([step] * 4, rates) == 4.0 + 12.0, "bytes of all ranks"
    slower = {**step, "forward": phase(5.0, 0.5, 2e9, 0.0)}
    assert bound_of([step, slower], [{}, {}]) == 4.5 + 1.0, "the slowest rank"


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_rows_of_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program stands in for fio: a drive of 2 GB/s. Each of its jobs has moved 1 GB in half a second."""
    fio = tmp_path / "bin/fio"
    fio.parent.mkdir()
    fio.write_text(f"#!{sys.executable}\n{FIO}")
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fio.parent}{os.pathsep}{os.environ['PATH']}")
    words = ["--sizes", "9M", "--width", "512", "--context", "32", "--ranks-of", "1", "--steps", "3"]
    found = rows("bound", tmp_path, *words, status={0, 1})
    assert [row["update"] for row in found] == ["step", "backward"]
    for row in found:
        assert row["wrong"] == 0 and row["steps"] == 3 and row["step_s"] > 0 and row["bound_s"] > 0
        assert set(row["phases"]) == {"forward", "backward", "step"}
        assert max(phase["drive_gbps"] for phase in row["phases"].values()) == 2.0
        # other programs shift reads ahead, so some weights are still resident
        assert 0.5 < row["read_over_plan"] < 1.2 and abs(row["written_over_plan"] - 1) < 0.01


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_rows_of_atomic_steps(tmp_path: Path) -> None:
    found = rows("atomic", tmp_path, "--sizes", "2M", "--width", "256", "--rounds", "2")
    assert [row["update"] for row in found] == ["step", "forward", "backward"]
    assert all(row["wrong"] == 0 and row["rounds"] == 2 and row["ratio"] > 0 for row in found)
    assert found[2]["drive_nbytes"] < found[0]["drive_nbytes"], "backward stores no sums"


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_rows_of_saves_in_the_background(tmp_path: Path) -> None:
    foreground, background = rows("background", tmp_path, "--sizes", "2M", "--width", "256", "--rounds", "1")
    assert (foreground["way"], foreground["slower_s"]) == ("foreground", 0), "no step runs beside it"
    assert background["way"] == "background" and background["until_saved_s"] > background["stands_s"] > 0
    assert foreground["kept"] and background["kept"]


@pytest.mark.long
@pytest.mark.timeout_s(500)
def test_bits_of_a_small_model(tmp_path: Path) -> None:
    found = rows("bits", tmp_path, "--sizes", "3M", "--width", "256", "--cases", "all", "--ranks", "2")
    assert [row["limit"] for row in found] == ["tight", "wide"]
    assert all(row["wrong"] == 0 and row["kept"] and row["losses"] == 12 and row["digest"] for row in found)


@pytest.mark.long
@pytest.mark.timeout_s(600)
def test_the_limit_is_kept_at_three_times_the_depth(tmp_path: Path) -> None:
    """Construction, steps, save, load and export of 30 and of 90 million parameters."""
    said, shallow, deep, layer = rows("depth", tmp_path, "--sizes", "34M,102M", timeout_s=500)
    assert said["kind"] == "refused" and "is too small for this model: at least" in said["said"]
    assert deep["layers"] == 3 * shallow["layers"]
    assert layer["kind"] == "layer" and layer["layers"] == [shallow["layers"], deep["layers"]]
    assert layer["plain_layer_nbytes"] > 0
    for row in (shallow, deep):
        assert {"construction", "step 3", "save", "load", "export", "close"} <= set(row["peaks_nbytes"])
        assert row["kept"] <= 1 and row["grown"] <= 1.02
    assert deep["steps_nbytes"] <= 1.05 * shallow["steps_nbytes"]
    assert deep["drive_nbytes"] > 2.9 * shallow["drive_nbytes"], "what grows is on the drive"


@pytest.mark.long
@pytest.mark.timeout_s(600)
def test_no_bit_of_100_million_parameters_depends_on_the_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"clip": 0.5, "accum": 2, "precision": "fp16"}
    training = Training(layers_for(1e8, 1024), 1024, 32, str(tmp_path), steps=2, gradients=None, hashed=True, **options)
    least, _ = refused(training, 1, 100.0)
    with pytest.raises(Failed, match="is too small for this model: at least"):
        run(Training(**{**vars(training), "limit": f"{least * 3 // 4}MiB"}), 100.0)
    tight = run(Training(**{**vars(training), "limit": f"{least + 8}MiB"}), 200.0)
    split = tight[0].max_bytes
    free = run(Training(**{**vars(training), "max_bytes": split}), 200.0)
    assert wrong(tight, free) == 0 and len(tight[0].losses) == 2 * training.accum and tight[0].digest
    assert max(tight[0].peaks.values()) <= (least + 8) << 20 < max(free[0].peaks.values())
