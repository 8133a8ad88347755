"""GPU benches with the CPU as the GPU: actions and files, not speed; and messages without a GPU."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from places import BENCH

sys.path.insert(0, str(BENCH))
from offloaded.figures import Host
from offloaded.fits import KEPT, RESERVE_NBYTES, STATE, fitting_layers, needed_nbytes, plan, search
from offloaded.train import accumulation
from offloaded.variants import deepspeed_config
from zcomm.demo.llama import PRESETS

pytestmark = pytest.mark.slow

GIB = 1 << 30


def run(program: str, *words: str, device: str = "cpu") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "ZCOMM_BENCH_DEVICE": device, "OMP_NUM_THREADS": "1"}
    name, *case = program.split()  # a program and its case
    command = [sys.executable, str(BENCH / name), *case, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        found.setdefault(json.loads(line)["table"], []).append(json.loads(line))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
@pytest.mark.parametrize("program", ["offload.py copies", "coll.py one-gpu", "offload.py train"])
def test_without_a_gpu_there_is_a_line(program: str) -> None:
    done = run(program, device="cuda")
    assert done.returncode == 77, done.stderr
    assert done.stdout.startswith("skipped: torch") and len(done.stdout.splitlines()) == 1


def test_pinned_copies(tmp_path: Path) -> None:
    done = run("offload.py copies", "--size", "1M", "--params", "100000", "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    found = rows_of(tmp_path / "rows")
    copies = found["Pinned copies"]
    kinds = {(row["direction"], row["while Adam"], row["variant"]) for row in copies}
    assert len(kinds) == len(copies) == 3 * 2 * 4 and all(row["#wrong"] == 0 for row in copies)
    goals = {(row["direction"], row["while Adam"]): row["goal"] for row in copies if row["variant"] == "pieces"}
    assert goals["down", False] == 0.98 and goals["both", False] == 0.95 and set(goals.values()) == {0.98, 0.95, 0.85}
    assert all(row["share"] == 1.0 for row in copies if row["variant"] == "peak" and not row["while Adam"])
    assert found["CPU Adam beside copies"][0]["alone GB/s"] > 0
    assert [row["while Adam"] for row in copies] == 12 * [False] + 12 * [True]


def test_pinned_copies_that_end_early_keep_what_they_had(tmp_path: Path) -> None:
    program = tmp_path / "breaks.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "from offloaded import copies as bench\n"
        "rounds_of, calls = bench.rounds_of, []\n"
        "def second_fails(*args):\n"
        "    calls.append(args)\n"
        "    return rounds_of(*args) if len(calls) == 1 else sys.exit('ended early')\n"
        "bench.rounds_of = second_fails\n"
        "bench.main(sys.argv[1:])\n"
    )
    done = run(str(program), "--size", "1M", "--params", "100000", "--json", str(tmp_path / "rows"))
    assert done.returncode == 1 and "ended early" in done.stderr, done.stderr
    copies = rows_of(tmp_path / "rows")["Pinned copies"]
    assert len(copies) == 12 and not any(row["while Adam"] for row in copies)


@pytest.mark.long
def test_ranks_that_share_a_device(tmp_path: Path) -> None:
    variants = ("--variants", "zcomm,zcomm-private,nccl")
    done = run("coll.py one-gpu", "-np", "3", "--sizes", "100K", *variants, "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows_of(tmp_path / "rows")
    ours = found["Ranks that share a GPU (3)"]
    assert [row["op"] for row in ours] == ["all_reduce", "reduce_scatter", "all_gather"] * 2
    assert [row["variant"] for row in ours] == ["zcomm"] * 3 + ["zcomm-private"] * 3
    assert all(row["#wrong"] == 0 for row in ours) and [row.get("goal") for row in ours] == [0.85] * 3 + [None] * 3
    assert all(row["share"] == pytest.approx(row["copy us"] / row["us"]) for row in ours)
    (gone,) = found["Peers that did not run"]
    assert gone["peer"] == "nccl" and gone["why"], "a peer that is not here is a row, and no failure"


@pytest.mark.timeout_s(200)
def test_offloaded_training(tmp_path: Path) -> None:
    words = [
        "--model",
        "tiny",
        "--variants",
        "zcomm-cpu,zcomm-cpu-behind,zcomm-nvme,fsdp2,deepspeed-cpu",
        "--accum",
        "2",
        "--rounds",
        "2",
    ]
    done = run("offload.py train", *words, "--nvme-path", str(tmp_path / "drive"), "--json", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows_of(tmp_path / "rows")
    rows = {row["variant"]: row for row in found["Offloaded training on one GPU"]}
    assert {"zcomm-cpu", "zcomm-nvme", "fsdp2"} <= set(rows) and all(row["#wrong"] == 0 for row in rows.values())
    assert "zcomm-cpu-behind" in rows
    ours = rows["zcomm-cpu"]
    assert ours["loss"] == rows["zcomm-nvme"]["loss"] and abs(rows["fsdp2"]["loss"] - ours["loss"]) < 0.05
    assert ours["tokens/step"] == 2 * 2 * 32 and ours["goal"] == 0.9 and "goal" not in rows["fsdp2"]
    assert ours["share"] == pytest.approx(ours["roof s"] / ours["s/step"])
    assert ours["practicality"] == pytest.approx(ours["none s"] / ours["s/step"])
    if "deepspeed-cpu" not in rows:
        (gone,) = found["Peers that did not run"]
        assert gone["peer"] == "deepspeed-cpu"


CELL = ("weights", "micro-batches", "clip", "updates")
TINY = ("--model", "tiny", "--tokens", "128", "--context", "32", "--rounds", "1")


@pytest.mark.timeout_s(200)
def test_cells(tmp_path: Path) -> None:
    """Cells of one micro-batch and of two have one build, both roofs, equal losses in both places, and timelines."""
    words = [*TINY, "--timelines", str(tmp_path / "timelines.zip"), "--json", str(tmp_path / "rows")]
    done = run("offload.py cells", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("zcomm-cpu: built") == 2 and done.stdout.count("none: built") == 1
    assert done.stdout.count("zcomm-cpu-backward: built") == done.stdout.count("zcomm-cpu-sums: built") == 1
    found = rows_of(tmp_path / "rows")
    cells, profiled = found["Cells of offloaded training"], found["Seconds of a step that was profiled"]
    here, there = "GPU", "host, 24 GiB of the GPU"
    expected = [(place, accum, clip, "auto") for place in (here, there) for accum in (1, 2) for clip in (False, True)]
    sums = [(here, 2, clip, "sums on the GPU") for clip in (False, True)]
    expected[4:4] = [(here, 1, False, "backward"), *sums]
    assert [tuple(row[key] for key in CELL) for row in cells] == expected
    assert [tuple(row[key] for key in CELL) for row in profiled] == expected
    assert [row.get("goal") for row in cells] == [0.95, 0.9, None, None, 0.95] + 6 * [None]
    for row in cells:
        assert row["share"] == pytest.approx(row["none s"] / row["s/step"]) and row["compute s"] > 0
        assert row["#wrong"] == 0 and row["host GiB"] > 0 and row["host B/param"] >= 0
    losses = [row["loss"] for row in cells]
    assert losses[:4] == pytest.approx(losses[7:], rel=1e-3), "the loss in blocks"
    assert losses[4:7] == pytest.approx([losses[0], *losses[2:4]], rel=0.02) and losses[0] != losses[2]
    with zipfile.ZipFile(tmp_path / "timelines.zip") as archive:
        assert len(archive.namelist()) == len(set(archive.namelist())) == 11
        assert all(json.loads(archive.read(name))["traceEvents"] for name in archive.namelist())
    assert not list(tmp_path.glob("*.json"))


def test_a_cell_that_fails_is_a_row(tmp_path: Path) -> None:
    """The next cell builds again. Without *none* the roof is *compute*."""
    program = tmp_path / "breaks.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "from offloaded import cells as bench\n"
        "timed, calls = bench.Bench.timed, []\n"
        "def some_fail(self, variant, number):\n"
        "    calls.append(number)\n"
        "    if len(calls) in (2, 3):\n"
        "        raise MemoryError('no more')\n"
        "    return timed(self, variant, number)\n"
        "bench.Bench.timed = some_fail\n"
        "sys.exit(bench.main(sys.argv[1:]))\n"
    )
    done = run(str(program), *TINY, "--accums", "1", "--json", str(tmp_path / "rows"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("zcomm-cpu: built") == 3 and "Seconds of a step that" not in done.stdout
    assert done.stdout.count("zcomm-cpu-backward: built") == 1
    found = rows_of(tmp_path / "rows")
    cells, gone = found["Cells of offloaded training"], found["Cells that did not run"]
    assert [row["clip"] for row in cells] == [True, False, False, True] and not any(row["#wrong"] for row in cells)
    assert [row["updates"] for row in cells] == ["auto", "backward", "auto", "auto"]
    assert all(row["none s"] is None and row["share"] == row["compute s"] / row["s/step"] for row in cells)
    assert [(row["variant"], row["why"]) for row in gone] == [
        ("none", "MemoryError: no more"),
        ("zcomm-cpu", "MemoryError: no more"),
    ]


@pytest.mark.long
def test_rounds_that_were_made_are_kept(tmp_path: Path) -> None:
    """The file has finished rounds while the program runs, so a failure keeps them."""
    program = tmp_path / "breaks.py"
    program.write_text(
        f"import sys; sys.path.insert(0, {str(BENCH)!r})\n"
        "from offloaded import train as bench\n"
        "timed, calls = bench.timed, []\n"
        "def third_fails(variant, number, inner):\n"
        "    calls.append(number)\n"
        "    return timed(variant, number, inner) if calls.count(4) < 2 else sys.exit('ended early')\n"
        "bench.timed = third_fails\n"
        "bench.main(sys.argv[1:])\n"
    )
    rows = tmp_path / "rows"
    rows.write_text('{"table": "Before", "x": 1}\n')
    words = ["--model", "tiny", "--variants", "zcomm-cpu,zcomm-none", "--accum", "1", "--json", str(rows)]
    done = run(str(program), *words)
    assert done.returncode == 1 and "ended early" in done.stderr, done.stdout + done.stderr
    found = rows_of(rows)
    assert found["Before"] == [{"table": "Before", "x": 1}]
    kept = found["Offloaded training on one GPU"]
    assert [(row["variant"], row["rounds"]) for row in kept] == [("zcomm-cpu", 2), ("zcomm-none", 2)]
    assert kept[0]["loss"] == kept[1]["loss"] and not (tmp_path / "rows.new").exists()
    done = run("offload.py train", *words, "--seconds", "0")
    assert done.returncode == 0 and "stopped after 1 rounds" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
def test_what_does_not_fit_the_host_is_not_started(tmp_path: Path) -> None:
    def numel_of(layers: int) -> int:
        return layers * 10**9

    assert needed_nbytes("zcomm-cpu", 10**9, 1.0) == 16 * 10**9 + RESERVE_NBYTES
    assert needed_nbytes("zcomm-nvme", 10**9, 0.5) == 11 * 10**9 + RESERVE_NBYTES
    assert needed_nbytes("fsdp2", 10**9, 1.0) > needed_nbytes("zcomm-cpu", 10**9, 1.0)
    host = 100 * GIB + RESERVE_NBYTES
    assert fitting_layers(32, numel_of, "zcomm-cpu", 1.0, host) == 6
    assert fitting_layers(4, numel_of, "zcomm-cpu", 1.0, host) == 4
    assert fitting_layers(4, numel_of, "zcomm-cpu", 1.0, RESERVE_NBYTES) == 0
    tiny = PRESETS["tiny"]
    host_nbytes = needed_nbytes("zcomm-cpu", replace(tiny, num_hidden_layers=1).numel(), 1.0) - RESERVE_NBYTES + GIB
    words = ["--model", "tiny", "--accum", "1", "--rounds", "1", "--json", str(tmp_path / "rows")]
    done = run(
        "offload.py train", *words, "--variants", "zcomm-cpu,fsdp2", "--host-gib", str((host_nbytes + 1000) / GIB)
    )
    assert done.returncode == 0 and "1 layers instead of 2" in done.stdout, done.stdout + done.stderr
    found = rows_of(tmp_path / "rows")
    (ours,), (gone,) = found["Offloaded training on one GPU"], found["Peers that did not run"]
    assert ours["layers"] == 1 and ours["variant"] == "zcomm-cpu"
    assert gone["peer"] == "fsdp2" and "GiB of host memory" in gone["why"]
    done = run("offload.py train", *words, "--variants", "zcomm-cpu", "--host-gib", "1")
    assert done.returncode == 77 and "of one layer needs" in done.stdout
    done = run("offload.py train", *words, "--variants", "zcomm-cpu", "--host-gib", "1", "--layers", "2")
    assert done.returncode == 1 and "GiB of host memory" in done.stderr, "a given size stays"


def test_micro_batches_are_as_many_as_hide_the_host() -> None:
    host = Host(step_bps=28e9, copy_bps=None)  # a billion parameters: 1 s, and 12 / 28 s for each micro-batch
    for compute, wanted in ((10.0, 1), (1.2, 3), (0.9, 6), (0.1, 8)):
        assert accumulation(10**9, 1000, compute, host) == wanted
        enough = [n for n in range(1, 8) if n * compute >= 1.5 * (28 + 12 * n) / 28]
        assert (enough or [8])[0] == wanted


def test_the_largest_is_planned_by_bytes() -> None:
    def numel_of(layers: int) -> int:
        return layers * 10**9

    # the host bounds: 16 bytes a parameter; the drive takes as many as fit on it
    assert plan(1000 * GIB, 100 * GIB, 0, numel_of) == (5, 0.0)
    layers, fraction = plan(1000 * GIB, 100 * GIB, 60 * GIB, numel_of)
    on_drive = fraction * STATE * layers * 10**9
    assert layers == 9 and on_drive <= 0.85 * 60 * GIB
    assert (KEPT + STATE) * layers * 10**9 - on_drive <= 0.85 * 100 * GIB
    assert plan(40 * GIB, 1000 * GIB, 1000 * GIB, numel_of) == (10, 1.0), "the GPU bounds, and all state may go"
    assert plan(8 * GIB, 1 * GIB, 0, numel_of) == (0, 0.0)


@pytest.mark.parametrize(("limit", "status"), [(100, 0), (26, 0), (0, 1)])
@pytest.mark.parametrize("deepspeed", [True, False])
def test_the_search_goes_down(
    tmp_path: Path,
    limit: int,
    status: int,
    deepspeed: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if deepspeed else None)
    program = tmp_path / "attempt.py"
    program.write_text(
        "import sys\n"
        "words = sys.argv[1:]\n"
        "layers, variant = int(words[words.index('--layers') + 1]), words[words.index('--variants') + 1]\n"
        f"ok = variant.startswith('zcomm') and layers <= {limit}\n"
        "print(f'  variant {variant}  ' if ok else 'no'); sys.exit(0 if ok else 'out of memory')\n"
    )
    options = argparse.Namespace(host_gib=128.0, nvme_path=str(tmp_path), json=str(tmp_path / "rows"))
    assert search(options, 30 * GIB, [sys.executable, str(program)]) == status
    said = capsys.readouterr().out
    if limit:
        (best,) = rows_of(tmp_path / "rows")["The largest model that trains"]
        assert best["variant"] == "zcomm-nvme" and best["layers"] <= limit
    assert ("deepspeed-nvme, " in said) == deepspeed and ("DeepSpeed is not installed" in said) != deepspeed
    assert ("out of memory" in said) == (deepspeed or limit < 100)


def test_deepspeed_is_set_to_the_same_work() -> None:
    options = argparse.Namespace(batch=4, nvme_path="/mnt")
    cpu, nvme = (deepspeed_config(options, 2, where) for where in ("cpu", "nvme"))
    assert cpu["gradient_clipping"] == 0.0 and cpu["gradient_accumulation_steps"] == 2
    assert cpu["zero_optimization"]["stage"] == 2 and nvme["zero_optimization"]["stage"] == 3
    assert nvme["zero_optimization"]["offload_optimizer"]["nvme_path"] == "/mnt"
