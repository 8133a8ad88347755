"""Record of what a figure depends on, and the JSON lines that keep it."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
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
    """Return this program as it was called, with the names of its files alone, without their folders."""
    return " ".join(Path(word).name if os.path.isabs(word) else word for word in sys.argv)


class JsonLines:
    """Writer of records, one JSON object a line; does nothing without a path. `append`: keeps what is there."""

    def __init__(self, path: str | None, append: bool = False) -> None:
        self._file = open(path, "a" if append else "w", encoding="utf-8") if path else None  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
