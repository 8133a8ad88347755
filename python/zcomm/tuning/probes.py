"""One probe: a short run of the program as a job of its own, with a time limit, and its files.

A probe that is late is told to end (SIGTERM), and killed ten seconds later. zcomm's launcher ends its ranks, and the
kernel kills them when the launcher is killed. Files are only for their owner.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_MARK = ".zcomm-autotuning"  # in folders that a later tuning may replace
_GRACE_S = 10.0


def write(path: Path, text: str) -> None:
    """Write a file for its owner only."""
    with _open(path) as file:
        file.write(text.encode())


def _open(path: Path) -> IO[bytes]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def own_folder(path: Path, overwrite: bool) -> None:
    """Make a folder for its owner only. overwrite: remove an earlier tuning's. Raises: ValueError for another's."""
    if path.exists() and not (path / _MARK).is_file() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} is not a folder of an earlier tuning: remove it, or give another one")
    if overwrite and path.exists():
        shutil.rmtree(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    write(path / _MARK, "")


@dataclass(frozen=True)
class Ended:
    """The end of a probe. reason: "" if it has written metrics."""

    reason: str
    metrics: dict[str, Any]
    info: dict[str, Any]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty without a file, or one that is not whole."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run(command: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a probe until it ends, for at most ``limit_s`` seconds. folder: for its files, which exists."""
    with _open(folder / "stdout.log") as out, _open(folder / "stderr.log") as err:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        late = False
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process)
    metrics, info = read_json(folder / "metrics.json"), read_json(folder / "model_info.json")
    if metrics:
        return Ended("", metrics, info)
    return Ended(_reason(process.returncode, late, limit_s, folder), {}, info)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and all that it has left in its session."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, None)):
        if process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _reason(code: int, late: bool, limit_s: float, folder: Path) -> str:
    if late:
        return f"killed after {limit_s:g} s: {folder / 'stderr.log'}"
    if code == 0:
        return "ended before the last step to measure: lower end_profile_step, or train longer"
    lines = (folder / "stderr.log").read_text(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return f"exit code {code}: {last[:200]}"
