"""Record of the facts that a figure depends on, and the JSON lines that keep it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def machine() -> dict[str, Any]:
    """Return CPU, cores, kernel, versions, revision, and how busy the machine was."""
    import psutil
    import torch

    import zcomm

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    revision = ""
    if shutil.which("git"):
        ask = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
        revision = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zcomm": zcomm.__version__,
        "revision": revision or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def command_line() -> str:
    """Return this program's command line, with the names of its files without their folders."""
    return " ".join(Path(word).name if os.path.isabs(word) else word for word in sys.argv)


class Results:
    """Records of a run, kept in memory and written to STEM.jsonl at once. append: keep the records of STEM, too."""

    def __init__(self, stem: Path | None, append: bool = False) -> None:
        kept = stem.with_suffix(".jsonl") if stem else None
        self._stem = stem
        self.records: list[dict[str, Any]] = []
        if kept and append and kept.exists():
            self.records = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
        self._lines = JsonLines(str(kept) if kept else None, append)

    def keep(self, record: dict[str, Any]) -> None:
        """Add a record and write it."""
        self.records.append(record)
        self._lines.write(record)

    def write_page(self, page_of: Callable[[list[dict[str, Any]]], str]) -> None:
        """Write STEM.md; does nothing without a stem."""
        if self._stem:
            self._stem.with_suffix(".md").write_text(page_of(self.records), encoding="utf-8")


class JsonLines:
    """Writer of records, one JSON object a line; does nothing without a path. `append`: keep the file's lines."""

    def __init__(self, path: str | None, append: bool = False) -> None:
        self._file = open(path, "a" if append else "w", encoding="utf-8") if path else None  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
