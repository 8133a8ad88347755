"""Benches run as programs: each operation's result is checked; absent peers are skipped with a line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from places import BENCH

pytestmark = [pytest.mark.slow, pytest.mark.timeout_s(300)]  # programs, run next to other tests

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")


def run(program: str, *flags: str, env: dict[str, str] | None = None, check: bool = True) -> str:
    """Run a program (and its case, after a space); return its output."""
    name, *case = program.split()
    command = [sys.executable, str(BENCH / name), *case, *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, env={**os.environ, **(env or {})}, check=False
    )
    if check and done.returncode:
        pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}", pytrace=False)
    return done.stdout + done.stderr


def one_size(size: str) -> list[str]:
    return ["-b", size, "-e", size, "-n", "7", "-w", "1"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("operations", [COLLECTIVES, ("sendrecv",)], ids=["collectives", "sendrecv"])
def test_operations(operations: tuple[str, ...], tmp_path: Path) -> None:
    """Results are exact for a size that no slot divides, in a marked row."""
    file = tmp_path / "rows.jsonl"
    text = run("allreduce_bw", "-np", "3", "--op", ",".join(operations), *one_size("60012"), "--json", str(file))
    machine, *rows = lines_of(file)
    assert machine["kind"] == "machine" and machine["world_size"] == 3
    assert [row["op"] for row in rows] == list(operations) and "#wrong in all: 0" in text
    for row in rows:
        assert row["wrong"] == {"symmetric": 0, "private": 0}
        for variant in ("symmetric", "private"):
            tail = row["percentiles_us"][variant]
            assert 0 < tail["p50"] <= tail["p95"] <= tail["p99"]
            assert row["share_of_roof"][variant] == pytest.approx(row["roof_us"] / row["time_us"][variant])
            assert row["busbw_gbps"][variant] > 0


def test_peers_interleaved_or_skipped(tmp_path: Path) -> None:
    """Gloo has a row next to ours; an absent peer is skipped with its reason, and the run still succeeds."""
    file, nothing = tmp_path / "rows.jsonl", tmp_path / "empty"
    nothing.mkdir()
    env = {"PATH": str(nothing), "ZCOMM_MPICH": str(nothing)}  # no mpirun
    text = run(
        "allreduce_bw",
        "-b",
        "64",
        "-e",
        "64",
        "-n",
        "7",
        "-w",
        "1",
        "--peer",
        "gloo,openmpi",
        "--json",
        str(file),
        env=env,
    )
    assert "# peer openmpi: skipped, " in text
    machine, row = lines_of(file)
    assert set(machine["skipped"]) == {"openmpi"}
    assert row["wrong"] == {"symmetric": 0, "private": 0, "gloo": 0}
    assert row["factor_over_peer"].keys() == {"gloo"}


def test_16_bit_types_and_their_rounding(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    run("allreduce_bw", "-d", "bfloat16", *one_size("9K"), "--json", str(file))
    row = lines_of(file)[-1]
    assert row["wrong"] == {"symmetric": 0, "private": 0}
    assert all(0 < ulp <= 0.5 + 2**-16 for ulp in row["worst_ulp"].values())


@pytest.mark.long
def test_more_ranks_than_cores_picture_and_model(tmp_path: Path) -> None:
    picture = tmp_path / "share.png"
    text = run(
        *("allreduce_bw", "-np", "5", "-b", "1K", "-e", "16K", "-f", "16", "-n", "7", "-w", "1"),
        *("--variants", "private", "--model", "--png", str(picture)),
    )
    assert "# model: Machine(" in text and "symmetric" not in text.partition("(us)")[2]
    assert picture.exists() or "matplotlib is not installed" in text


def test_link_of_two_hosts(tmp_path: Path) -> None:
    """Rows have bounds of the same run; a delay that the kernel cannot make is told and not claimed."""
    file = tmp_path / "link.jsonl"
    few = ("--gbit", "4", "--size", "100K", "--rounds", "7", "--json", str(file))
    text = run("coll.py link", *few, "--per-host", "2", "--delay-us", "20", "--op", "all_reduce,all_gather")
    if text.startswith("# link: skipped, "):
        pytest.skip(text.strip())
    machine, *rows = lines_of(file)
    assert machine["backend"] == "hierarchical"
    assert [(row["op"], row["order"]) for row in rows] == [
        *(("all_reduce", order) for order in ("any", "rank")),
        ("all_gather", "any"),
    ]
    for row in rows:
        assert row["wrong"] == 0 and (row["delay_us"] == 20) == (row["delay_note"] == "")
        assert row["bound_us"] == max(row["across_us"], row["inside_us"]) > 0
        assert row["ratio"] == pytest.approx(row["time_us"] / row["bound_us"])
    assert text.count("#wrong 0") == 3
    for namespace in Path("/run/netns").glob("zcb*"):  # a program that still runs may have some
        assert Path(f"/proc/{namespace.name[3:-1]}").exists(), namespace


def test_codecs_beside_exact_calls(tmp_path: Path) -> None:
    """The rows of one host; with a cable, as test_link_of_two_hosts."""
    file = tmp_path / "codec.jsonl"
    few = ("--gbit", "0", "--size", "100K", "--rounds", "7", "--json", str(file))
    run("coll.py codec", *few, "--op", "reduce_scatter,all_gather,all_reduce", "--codec", "int8,sign")
    machine, *rows = lines_of(file)
    assert machine["backend"] == "shm" and len(rows) == 6
    for row in rows:
        assert row["wrong"] == 0 and row["gain"] == pytest.approx(row["exact_us"] / row["time_us"])
        limit = {"int8": 0.27, "sign": 0.04}[row["codec"]] / 2 * (2 if row["op"] == "all_reduce" else 1)
        assert 0 < row["sent_nbytes"] < limit * row["nbytes"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--op", "gossip"), "--op gossip: use all_reduce, "),
        (("--peer", "absent"), "--peer absent: use gloo, openmpi, mpich, deepspeed-shm, torch"),
        (("-b", "8X"), "invalid parse_size value"),
        (("--op", "sendrecv", "-np", "1"), "at least two ranks"),
    ],
)
def test_bad_flags_are_named(flags: tuple[str, ...], words: str) -> None:
    assert words in run("allreduce_bw", *flags, check=False)


def test_zero_step(tmp_path: Path) -> None:
    file = tmp_path / "zero.jsonl"
    small = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16", "--rounds", "7", "--warmup", "1")
    names = "none,zcomm-1,zcomm-3-nvme,ddp-gloo,fsdp2,deepspeed-1"
    run("zero.py step", *small, "--variants", names, "--nvme-path", str(tmp_path), "--json", str(file))
    result = lines_of(file)[1]
    assert set(names.split(",")) - {"deepspeed-1"} <= result["step_ms"].keys()
    assert not any(result["wrong"].values()) and len(result["wrong"]) >= 4
    assert result["of_none"]["none"] == 1.0
    assert list(tmp_path.iterdir()) == [file]  # no file is left on the drive
    assert "zcomm-7: stage=7" in run("zero.py step", *small, "--variants", "zcomm-7", check=False)
    apart = ("--apart", "1", "--keep-heap", "--variants", "none,zcomm-2,deepspeed-9", "--json", str(file))
    run("zero.py step", *small, *apart)
    result = lines_of(file)[1]
    assert result["apart"] == 1 and result["of_none"].keys() == result["faults"].keys() == {"none", "zcomm-2"}


@pytest.mark.long
def test_overlap_and_profile_cost(tmp_path: Path) -> None:
    small = ("--layers", "1", "--width", "16", "--heads", "2", "--context", "16")
    file = tmp_path / "overlap.jsonl"
    if len(os.sched_getaffinity(0)) > 1:
        run("zero.py overlap", *small, "--rounds", "7", "--warmup", "1", "--bucket-mb", "1,0.01", "--json", str(file))
        rows = lines_of(file)[1:]
        assert [row["computes"] for row in rows] == ["one", "one", "both", "both"]
        for whole, cut in (rows[:2], rows[2:]):
            assert whole["tail"] == 1.0 and cut["tail"] < 1.0 and whole["nbytes"] <= cut["nbytes"]
        assert all(row[f"{name}_ms"] > 0 for row in rows for name in ("compute", "communicate", "both"))
        assert [row.get("limit_ms", 0) > 0 for row in rows] == [True, True, False, False]
    run("zero.py profile", *small, "--rounds", "2", "--json", str(file))
    rows = lines_of(file)[1:]
    assert [row["stage"] for row in rows] == [2, 3] and all(row["spans_per_step"] > 5 for row in rows)
    text = run("zero.py page", *small, "--rounds", "2", "--seconds", "0.2", "--stages", "2", "--json", str(file))
    (row,) = lines_of(file)[1:]
    assert all(row[f"{name}_ms"] > 0 for name in ("off", "on", "read")) and "a page, stage 2" in text
    assert 0 < row["on_share"] < 1 and row["reader_s_per_look"] > 0


@pytest.mark.long
def test_ddp_step(tmp_path: Path) -> None:
    file = tmp_path / "ddp.jsonl"
    small = ("--width", "32", "--heads", "2", "--layers", "1", "--context", "16", "--rounds", "7", "--warmup", "1")
    text = run("zero.py ddp", *small, "--json", str(file))
    result = lines_of(file)[-1]
    assert result["step_ms"].keys() >= {"none", "ddp-gloo"} and result["overhead_ms"]["none"] == 0.0
    assert all(value > 0 for value in result["step_ms"].values())
    if "ddp-zcomm" in result["mean_loss"]:  # the same steps on the same data
        assert result["mean_loss"]["ddp-zcomm"] == pytest.approx(result["mean_loss"]["ddp-gloo"], abs=1e-5)
        overhead = result["overhead_ms"]
        assert result["overhead_ratio"] == pytest.approx(overhead["ddp-zcomm"] / overhead["ddp-gloo"])
        assert "overhead over zcomm / over gloo" in text


@pytest.mark.slow
def test_curves_of_codecs(tmp_path: Path) -> None:
    file = tmp_path / "curves.jsonl"
    small = ("--width", "16", "--layers", "1", "--context", "16", "--batch", "2", "--steps", "60", "--seeds", "1")
    text = run("zero.py curves", *small, "--forms", "exact,d4g4,onebit", "--json", str(file))
    lines = {line["form"]: line for line in lines_of(file) if line["kind"] == "difference"}
    assert lines.keys() == {"exact", "d4g4", "onebit"} and lines["exact"]["differences"] == [0.0]
    assert 0 < abs(lines["d4g4"]["differences"][0]) < 0.1 and "onebit   loss minus exact" in text


def test_programs_list_their_cases() -> None:
    for program, cases in (
        ("coll.py", "suite, sweep, one-gpu, link, codec"),
        ("zero.py", "step, ddp, overlap, hosts, profile, page, curves, pipeline"),
        ("swap.py", "bandwidth, step"),
        ("adam.py", "step, curves"),
        ("offload.py", "train, cells, copies"),
    ):
        assert f"Cases: {cases}." in run(program, "--help")
        assert f"unknown: use {cases}" in run(program, "unknown", check=False)
    assert "--part" in run("coll.py suite", "--help") and "--apart" in run("zero.py step", "--help")


def test_cpp_benches(tmp_path: Path) -> None:
    """C++ benches, if built: correct results, a record for each row, ranks that exit."""
    programs = BENCH.parent / "build/bench/bench/cpp"
    if not (programs / "zcomm_bench").exists():
        pytest.skip("the C++ benches are not built (make bench-cpp)")
    file = tmp_path / "rows.jsonl"
    few = ["-np", "3", "-n", "30", "-w", "3", "--rounds", "3", "--json", str(file)]
    ladder = ["-b", "8", "-e", "64K", "-f", "8192"]
    subprocess.run([programs / "zcomm_bench", "latency", *ladder, *few], check=True, timeout=60)
    rows = lines_of(file)
    assert [(r["op"], r["variant"], r["nbytes"]) for r in rows] == [
        *(("all_reduce", variant, nbytes) for nbytes in (8, 65536) for variant in ("symmetric", "private")),
        ("barrier", "zcomm", 0),
    ]
    assert all(0 < r["p50_ns"] <= r["p99_ns"] and r["futex_hop_ns"] > 0 for r in rows)
    subprocess.run([programs / "zcomm_bench", "guard", *few], check=True, timeout=60)
    assert [(r["how"], r["world_size"]) for r in lines_of(file)] == [*(("pieces", n) for n in (2, 4, 8)), ("whole", 3)]
    subprocess.run([programs / "socket_roof", "100000", "3"], check=True, timeout=60)


@pytest.mark.long
def test_hosts_with_a_link(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("tc") is None:
        pytest.skip("a link between hosts needs root, `ip` and `tc`")
    file = tmp_path / "hosts.jsonl"
    small = ("--width", "128", "--layers", "4", "--heads", "2", "--context", "16", "--warmup", "1", "--rounds", "7")
    some = "zcomm-all,zcomm-hsdp,zcomm-hpz,fsdp2-hsdp,zcomm-all-w8g4,zcomm-hsdp-int4"
    run("zero.py hosts", *small, "--variants", some, "--json", str(file))
    result = lines_of(file)[1]
    assert result["wrong"] == dict.fromkeys(result["step_ms"], 0) and len(result["wrong"]) >= 2
    for name, sent in result["sent_nbytes"].items():
        assert sent == pytest.approx(result["formula_nbytes"][name], rel=0.05), "small messages have large headers"
