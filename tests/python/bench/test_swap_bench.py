"""bench/swap.py as a program: rows with checked data, a line for each absent peer, `zcomm bench`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zcomm
from places import BENCH

pytestmark = pytest.mark.slow

SMALL = ("--size", "4M", "--batch", "256K", "--batch-total", "1M")


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **(env or {})},
        check=False,
    )


def records_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_counters_and_absent_peers(tmp_path: Path) -> None:
    nothing, out = tmp_path / "empty", tmp_path / "result"
    nothing.mkdir()
    done = run(
        [str(BENCH / "swap.py"), "bandwidth", "--dir", str(tmp_path), "--out", str(out), *SMALL],
        {"PATH": str(nothing), "ZCOMM_DEEPSPEED_PYTHON": "/bin/false"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# peer fio: skipped, no fio" in done.stdout and "# peer deepspeed: skipped, " in done.stdout
    number = os.stat(tmp_path).st_dev
    counted = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat").exists()
    with zcomm.SwapFile(tmp_path) as swap:
        direct = bool(swap.stats()["direct"])
    machine, *rows = records_of(out.with_suffix(".jsonl"))
    assert set(machine["skipped"]) == {"fio", "deepspeed"} and str(tmp_path) not in json.dumps(machine)
    assert [(row["what"], row["tensor_nbytes"]) for row in rows] == [
        ("write", 4 << 20),
        ("read", 4 << 20),
        ("mixed", 2 << 20),
        ("write", 256 << 10),
        ("read", 256 << 10),
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert set(row["gbps"]) == {"zcomm", "zcomm threads", "zcomm no crc"}
        assert all(len(each) >= 5 and min(each) > 0 for each in row["rounds_gbps"].values())
        moved = row["moved_over_asked"]
        assert set(moved) == set(row["gbps"])
        if counted and direct:  # counted by the device, so other programs of that drive may add to it
            assert min(moved.values()) >= 0.99
        elif not counted:
            assert set(moved.values()) == {None}
    assert "| mixed | zcomm threads |" in out.with_suffix(".md").read_text()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("zcomm-")] == []


def test_what_the_device_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sectors of /sys/dev/block/*/stat as bytes; None without such a device."""
    monkeypatch.syspath_prepend(str(BENCH))
    from drive import counters

    stat = tmp_path / "stat"
    stat.write_text("  10 0 64 5 20 0 4096 9 0 0 0\n")
    monkeypatch.setattr(counters, "_device", lambda folder: tmp_path)
    assert counters.moved(tmp_path) == (64 * 512, 4096 * 512)
    monkeypatch.setattr(counters, "_device", lambda folder: None)
    assert counters.moved(tmp_path) is None and "not known" in counters.describe(tmp_path)


def test_shares_of_a_peer(tmp_path: Path) -> None:
    """A stand-in for fio claims one second for each run: the share is our rate over its rate."""
    fake, out = tmp_path / "fio", tmp_path / "result"
    fake.write_text('#!/bin/sh\necho \'{"jobs": [{"error": 0, "job_runtime": 1000}]}\'\n')
    fake.chmod(0o700)
    done = run(
        [
            str(BENCH / "swap.py"),
            "bandwidth",
            "--dir",
            str(tmp_path),
            "--out",
            str(out),
            "--peer",
            "fio",
            "--what",
            "read",
            *SMALL,
        ],
        {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = records_of(out.with_suffix(".jsonl"))
    sweep = [record for record in records if record["kind"] == "fio"]
    assert {record["ioengine"] for record in sweep} == {"io_uring", "libaio"}
    assert all(4 << 20 <= record["bs"] * record["iodepth"] <= 32 << 20 for record in sweep)
    row = records[-1]
    theirs = (4 << 20) / 1e9
    ratios = sorted(ours / theirs for ours in row["rounds_gbps"]["zcomm"])
    assert row["gbps"]["fio"] == pytest.approx(theirs)
    assert row["share_of"]["fio"]["zcomm"] == pytest.approx(ratios[len(ratios) // 2])
    costs = [
        1 - a / b for a, b in zip(row["shares"]["fio"]["zcomm"], row["shares"]["fio"]["zcomm no crc"], strict=True)
    ]
    said = next(line for line in out.with_suffix(".md").read_text().splitlines() if "checksum | < 2 % |" in line)
    assert f"| {100 * sorted(costs)[len(costs) // 2]:.1f} % |" in said and ("holds" in said) != ("**misses**" in said)


@pytest.mark.long
def test_the_swapped_step(tmp_path: Path) -> None:
    """Runs with a stand-in for fio that claims one second for each run."""
    fake, out = tmp_path / "fio", tmp_path / "result"
    fake.write_text('#!/bin/sh\necho \'{"jobs": [{"error": 0, "job_runtime": 1000}]}\'\n')
    fake.chmod(0o700)
    program = [str(BENCH / "swap.py"), "step", "--dir", str(tmp_path), "--state", "12M", "--out", str(out)]
    done = run(program, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [record for record in records_of(out.with_suffix(".jsonl")) if record["kind"] == "step"]
    assert [row["precision"] for row in rows] == ["fp32", "bf16"]
    for row in rows:
        assert row["wrong"] == 0 and len(row["rounds"]) == 14
        for each, share in zip(row["rounds"], row["shares"], strict=True):
            assert each["io_s"] == pytest.approx(each["moved_nbytes"] / row["nvme_nbytes"])
            assert share == pytest.approx(max(each["io_s"], each["ram_s"]) / each["step_s"])
            assert each["no_crc_s"] > 0
            assert each["moved_nbytes"] <= 2 * row["nvme_nbytes"] and each["returned_s"] <= each["step_s"]
    assert "| bf16 |" in out.with_suffix(".md").read_text()
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith("zcomm-")] == []


def test_zcomm_bench_swap() -> None:
    done = run(["-m", "zcomm.cli", "bench", "swapped-step", "--help"])
    assert done.returncode == 0 and "--ratio" in done.stdout
    done = run(["-m", "zcomm.cli", "bench", "swap", "--help"])
    assert done.returncode == 0 and "--batch-total" in done.stdout
    done = run(["-m", "zcomm.cli", "bench", "swap", "--what", "sideways"])
    assert done.returncode == 2 and "--what sideways: use write, read" in done.stderr
