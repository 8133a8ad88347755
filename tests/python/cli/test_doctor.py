"""`zcomm doctor`: the report of its findings."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from zcomm import _core
from zcomm.cli import doctor
from zcomm.cli.doctor_gpu import Finding
from zcomm.cli.main import main

FOUND = [Finding("ok", "kernel", "Linux"), Finding("note", "memlock", "64 KiB", "raise it [ulimit -l]")]


def shown(findings: list[Finding], terminal: bool) -> str:
    colour = "standard" if terminal else None
    console = Console(file=io.StringIO(), force_terminal=terminal, width=40, highlight=False, color_system=colour)  # type: ignore[arg-type]
    with console.capture() as text:
        doctor.show(findings, console)
    return text.get()


def test_findings_are_lines_and_coloured_on_a_terminal_alone() -> None:
    plain = shown(FOUND, terminal=False)
    assert plain.splitlines() == [
        "ok    kernel   Linux",
        "note  memlock  64 KiB",
        "               -> raise it [ulimit -l]",
        "",
        "1 note, nothing blocks training",
    ]
    coloured = shown(FOUND, terminal=True)
    assert "\x1b[32mok" in coloured and "\x1b[33mnote" in coloured and "\x1b" not in plain


def test_the_summary_counts() -> None:
    assert doctor.summary(FOUND[:1]) == "0 notes, nothing blocks training"
    fail = Finding("fail", "torch", "not installed", "pip install torch")
    assert doctor.summary([*FOUND, fail]) == "1 failure to mend before training, 1 note"


def test_what_the_command_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_core, "cuda_info", lambda: "CUDA 13.0")
    monkeypatch.setattr(_core, "cuda_available", lambda: False)
    monkeypatch.setenv("ZCOMM_PORT_RANGE", "2000-3000")
    monkeypatch.delenv("ZCOMM_THREADS", raising=False)
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "ZCOMM_PORT_RANGE" in said and "ZCOMM_THREADS" not in said and "--all" in said
    assert "not used: the core is built with CUDA 13.0, and no CUDA device is here" in said
    assert said.splitlines()[-1].endswith("nothing blocks training")
    assert main(["doctor", "--dir", str(tmp_path), "--all"]) == 0
    assert "ZCOMM_THREADS" in capsys.readouterr().out
