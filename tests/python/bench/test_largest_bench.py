"""bench/largest: its search, its rows at a tiny limit, and a memory limit that ends a try."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from places import BENCH

sys.path.insert(0, str(BENCH))
from limited.search import bisect, downwards
from limited.trial import Job, Outcome, run

GIB = 1 << 30


@pytest.mark.parametrize(("fits", "guess"), [(7, 1), (7, 7), (7, 30), (100, 3), (0, 5)])
def test_bisection_finds_the_deepest(fits: int, guess: int) -> None:
    tried: list[int] = []

    def attempt(layers: int) -> Outcome:
        tried.append(layers)
        return Outcome(None if layers <= fits else "memory")

    layers, outcome, why = bisect(attempt, guess, 1000, "drive")
    assert 0.95 * fits <= layers <= fits and why == "memory" and (outcome is not None) == (fits > 0)
    assert len(tried) == len(set(tried))
    assert bisect(attempt, 2, 5, "drive")[0] == min(fits, 5)
    assert bisect(attempt, 2, min(fits, 5), "drive")[2] == "drive"


@pytest.mark.parametrize("before", [0, 900, 400])
def test_peaks_that_grow_evenly_name_the_next_depth(before: int) -> None:
    """Peaks are 400 bytes plus 7 per layer; the guess for no layers may be wrong."""
    tried: list[int] = []

    def attempt(layers: int) -> Outcome:
        tried.append(layers)
        peak = 400 + 7 * layers
        return Outcome(None if peak <= 2000 else "memory", peak_nbytes=min(peak, 2001))

    layers, outcome, why = bisect(attempt, 20, 100_000, "drive", 2000, before)
    assert 0.95 * 228 <= layers <= 228 and why == "memory" and outcome is not None
    assert len(tried) == len(set(tried)) <= (3 if before == 400 else 7)


def test_a_plan_that_does_not_hold_is_lowered() -> None:
    tried: list[int] = []

    def attempt(layers: int) -> Outcome:
        tried.append(layers)
        return Outcome("memory" if layers > 80 else None)

    assert downwards(attempt, 100, "drive")[0] == 72 and tried == [100, 85, 72]
    assert downwards(lambda layers: Outcome("time"), 100, "drive")[::2] == (0, "time")


def test_a_try_ends_at_its_wall(tmp_path: Path) -> None:
    job = Job("torch-mmap", 1, 64, 1, 16, 1, 32 << 20, str(tmp_path))
    found = run(job, sys.executable, 60.0, 0)
    assert found.why == "memory" and found.peak_nbytes > 32 << 20 and not list(tmp_path.iterdir())
    assert run(job, sys.executable, 0.0, 0).why in ("time", "memory")


def test_a_try_leaves_no_process_whatever_its_group(tmp_path: Path) -> None:
    """ninja's compilers have their own process groups and outlive the process that started them."""
    python, pid = tmp_path / "python", tmp_path / "pid"
    lines = [f"#!{sys.executable}", "import os, sys, time", "if child := os.fork():"]
    lines += [f"    open({str(pid)!r}, 'w').write(str(child))", "    sys.exit(3)"]
    lines += ["os.setpgid(0, 0)", "time.sleep(100)"]
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    assert run(Job("torch-mmap", 1, 64, 1, 16, 1, None, str(tmp_path)), str(python), 60.0, 0).why == "error"
    assert not Path(f"/proc/{pid.read_text()}").exists() or "Z" in Path(f"/proc/{pid.read_text()}/stat").read_text()


def test_freed_tensors_of_peers_leave_their_process(tmp_path: Path) -> None:
    """Peers run with MALLOC_MMAP_THRESHOLD_; zcomm configures malloc itself, as it does for its users."""
    python, out = tmp_path / "python", tmp_path / "environ"
    lines = [f"#!{sys.executable}", "import os", f"open({str(out)!r}, 'w').write(' '.join(os.environ))"]
    python.write_text("\n".join(lines))
    python.chmod(0o755)
    for variant, expected in (("deepspeed", True), ("torch-mmap", True), ("zcomm", False), ("zcomm-8bit", False)):
        run(Job(variant, 1, 64, 1, 16, 1, None, str(tmp_path)), str(python), 60.0, 0)
        assert ("MALLOC_MMAP_THRESHOLD_" in out.read_text().split()) == expected, variant


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_rows_of_a_tiny_model(tmp_path: Path) -> None:
    out, drive = tmp_path / "rows", tmp_path / "drive"
    drive.mkdir()
    words = ["--dir", str(drive), "--limits", "2G", "--most", "5e5", "--width", "64", "--context", "16"]
    words += ["--leave", "1M", "--check-limit", "1G", "--check-layers", "2", "--json", str(out)]
    words += ["--variants", "zcomm,zcomm-8bit,deepspeed,fsdp2,torch-mmap,torch-mmap-anon"]
    done = subprocess.run(
        [sys.executable, str(BENCH / "largest"), *words],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "ZCOMM_DEEPSPEED_PYTHON": "/bin/false"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    machine, *rows = map(json.loads, out.read_text().splitlines())
    assert machine["kind"] == "machine" and str(tmp_path) not in json.dumps(machine)
    found = {row["variant"]: row for row in rows}
    assert set(found) == {"zcomm", "zcomm-8bit", "deepspeed", "fsdp2", "torch-mmap", "torch-mmap-anon"}
    assert found.pop("deepspeed")["params"] == 0, "a peer that is not here is a row"
    for row in found.values():
        assert row["wrong"] == 0 and row["at_least"] and row["bound"] == "--most" and len(row["step_s"]) == 3
        assert 0 < row["params"] <= 5e5 and 0 < row["peak_nbytes"] <= row["limit_nbytes"]
    assert not list(drive.iterdir())
