"""DeepSpeed's commands: each serves its options by a part of zcomm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zcomm.compat.deepspeed import checkpoint, commands, env_report
from zcomm.compat.deepspeed.checkpoint import ds_to_universal


def test_elastic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [2, 4], "min_gpus": 1, "max_gpus": 8}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"elasticity": {**section, "version": 0.1}}))
    assert commands.elastic(["-c", str(path), "-w", "2"]) == 0
    said = capsys.readouterr().out
    assert "train_batch_size 12, numbers of ranks 1, 2, 3, 6" in said
    assert "with 2 ranks: train_micro_batch_size_per_gpu" in said
    path.write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        commands.run("elastic", ["-c", str(path)])
    assert "ds_elastic: error: the configuration has no section" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "ds.json: a configuration is a JSON object, not"),
        ("{", "ds.json: not valid JSON at line 1"),
        ('{"elasticity": 3}', '"elasticity" must be an object, got 3'),
    ],
)
def test_elastic_names_a_wrong_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        commands.run("elastic", ["-c", str(tmp_path / "ds.json")])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("read", [False, True])
def test_io(tmp_path: Path, capsys: pytest.CaptureFixture[str], read: bool) -> None:
    args = ["--folder", str(tmp_path), "--io_size", "1M", "--loops", "2", "--validate", *(["--read"] if read else [])]
    assert commands.io(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(
        re.match(rf"{'read' if read else 'write'}: 999424 bytes in .* GB/s$", each) for each in lines
    )
    assert not list(tmp_path.iterdir())


def test_commands_that_start_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command lines of `zcomm doctor`, of `zcomm run` and of ssh."""
    ran: list[list[str]] = []

    def start(command: list[str], **others: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n")
    monkeypatch.delenv("RANK", raising=False)
    assert env_report.cli_main([]) == 3 and commands.nvme_tune(["--nvme_dir", "/x", "/y"]) == 3
    assert commands.bench(["--all-reduce", "--num_gpus", "4"]) == 3
    assert commands.ssh(["-f", str(tmp_path / "hosts"), "echo", "a b"]) == 3
    zcomm = [sys.executable, "-m", "zcomm.cli"]
    assert ran[:2] == [[*zcomm, "doctor"], [*zcomm, "doctor", "--calibrate", "--dir", "/x"]]
    assert ran[2][:6] == [*zcomm, "run", "-n", "4"] and ran[2][-4:] == ["bench", "--all-reduce", "--num_gpus", "4"]
    assert ran[3:] == [["ssh", "one", "echo 'a b'"], ["ssh", "two", "echo 'a b'"]]
    monkeypatch.setattr("shutil.which", lambda name: name)
    assert commands.ssh(["-f", str(tmp_path / "hosts"), "uptime"]) == 3 and ran[-1] == [
        "pdsh",
        "-w",
        "one,two",
        "uptime",
    ]


def test_the_module_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zcomm.compat.deepspeed.commands", "other"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "expected one of report, bench, io" in done.stderr
    assert checkpoint.ds_to_universal is ds_to_universal
    with pytest.raises(SystemExit, match="2"):
        commands.run("to_universal", ["--input_folder", "/none", "--output_folder", "/none/out"])


@pytest.mark.slow
def test_bench_measures_among_ranks() -> None:
    command = [sys.executable, "-m", "zcomm.compat.deepspeed.commands", "bench", "--trials", "1", "--warmups", "1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command, "--minsize", "10", "--maxsize", "12"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks, float") and len(lines) == 1 + 2 * 5
    assert {line.split()[0] for line in lines[1:]} == {"all_reduce", "all_gather", "all_to_all", "broadcast", "pt2pt"}
