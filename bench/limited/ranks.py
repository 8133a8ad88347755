"""Ranks of a run: each runs a program that receives a job as JSON, and prints its result as a line of JSON. Phases."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAYS = "zcomm-bench "


class Failed(Exception):
    """Error: the ranks did not reach their end; the text has the end of their output."""


def run(program: str, job: dict[str, Any], world_size: int, timeout_s: float, threads: int = 1) -> list[dict[str, Any]]:
    """Run ``program`` on each rank; return each rank's result, rank 0 first. threads: of torch. Raises: Failed."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "zcomm.cli.main", "run", "-n", str(world_size), "--no-prefix"]
    process = subprocess.Popen(
        [*command, program, json.dumps(job)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": path},
        text=True,
    )
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise Failed(f"still ran after {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its ranks
            process.wait()
    said = [json.loads(line.removeprefix(SAYS)) for line in text.splitlines() if line.startswith(SAYS)]
    if process.returncode or len(said) != world_size:
        raise Failed(text[-3000:])
    if "has held" in text:  # the guard
        print(next(line for line in text.splitlines() if "has held" in line), file=sys.stderr)
    return sorted(said, key=lambda each: int(each["rank"]))


def say(found: dict[str, Any]) -> None:
    """Print a rank's result, which has "rank"."""
    print(SAYS + json.dumps(found), flush=True)


@dataclass(frozen=True)
class Phase:
    """Part of a rank's run. peak_nbytes: VmHWM. read_nbytes, written_nbytes: of the drive, by the kernel's count."""

    name: str
    seconds: float
    peak_nbytes: int
    read_nbytes: int
    written_nbytes: int


class Phases:
    """Phases of a rank, in order. Each resets the kernel's high-water mark."""

    def __init__(self) -> None:
        self.found: list[Phase] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, begin = _counted("io"), time.perf_counter()
        yield
        seconds, after = time.perf_counter() - begin, _counted("io")
        read, written = (after[key] - before[key] for key in ("read_bytes", "write_bytes"))
        self.found.append(Phase(name, seconds, 1024 * _counted("status")["VmHWM"], read, written))


def _counted(name: str) -> dict[str, int]:
    """Return the numbers of a file of /proc/self by their names."""
    lines = Path("/proc/self", name).read_text(encoding="ascii", errors="replace").splitlines()
    words = (line.replace(":", " ").split() for line in lines)
    return {each[0]: int(each[1]) for each in words if len(each) > 1 and each[1].isdigit()}
