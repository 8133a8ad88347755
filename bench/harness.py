"""What all benches share: starting ranks, timing variants interleaved, and describing the machine.

A figure is the median of >= 7 rounds. In each round every variant runs once, A B C D A B C D ..., each started by a
barrier, so that a machine that slows down slows all of them. A round's time is that of the slowest rank.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MIN_ROUNDS = 7


def use_project_python() -> None:
    """Goes on in the project's .venv when the interpreter at hand has no zcomm."""
    from importlib.util import find_spec

    if find_spec("zcomm") and find_spec("torch"):
        return
    python = ROOT / ".venv/bin/python"
    if not python.exists() or Path(sys.prefix) == ROOT / ".venv":
        sys.exit("zcomm is not installed here; `make setup` builds it in .venv")
    os.execv(python, [str(python), *sys.argv])


def parse_size(text: str) -> int:
    """'8', '64K', '256M', '1G' -> bytes (powers of 1024, as nccl-tests reads them)."""
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = text[-1:].upper()
    try:
        nbytes = int(float(text[:-1]) * scale[unit]) if unit in scale else int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a size; write for example 8, 64K, 256M, 1G") from None
    if nbytes <= 0:
        raise ValueError(f"size {text!r} is not positive")
    return nbytes


def sizes(begin: int, end: int, factor: float, step: int | None = None) -> Iterator[int]:
    """begin, begin * factor (or + step), ... <= end."""
    size = begin
    while size <= end:
        yield size
        size = size + step if step else max(size + 1, int(size * factor))


def is_rank() -> bool:
    """Whether a launcher (ours or torchrun, mpirun) has started this process as a rank."""
    return any(name in os.environ for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"))


def start_ranks(world_size: int, timeout_s: float) -> int:
    """Runs this script again as `world_size` ranks; exit code of the first that failed, or 0. Kills the others then."""
    with tempfile.TemporaryDirectory(prefix="zcomm-bench-") as folder:
        ranks = []
        for rank in range(world_size):
            env = {
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "ZCOMM_INIT_METHOD": f"file://{folder}/store",
                "ZCOMM_BENCH_FOLDER": folder,
            }
            ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
        try:
            return _wait_for_all(ranks, timeout_s)
        except KeyboardInterrupt:
            return 130
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(signal.SIGKILL)
                process.wait()


def _wait_for_all(ranks: list[subprocess.Popen[bytes]], timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, code in enumerate(codes):
            if code:
                print(f"rank {rank} ended with exit code {code}", file=sys.stderr)
                time.sleep(1.0)  # let the others print their error
                return 1
        if all(code == 0 for code in codes):
            return 0
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            print(f"ranks {running} still ran after {timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(0.05)


def interleaved(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    inner: int,
    warmup: int,
    barrier: Callable[[], object],
    gather: Callable[[list[float]], list[list[float]]],
) -> dict[str, float]:
    """Median seconds per call of each variant, over rounds, of the slowest rank. `inner` calls make one round."""
    rounds = max(MIN_ROUNDS, rounds)
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for name in variants:
        for _ in range(warmup):
            variants[name]()
    for _ in range(rounds):
        for name, call in variants.items():
            barrier()
            begin = time.perf_counter()
            for _ in range(inner):
                call()
            taken[name].append((time.perf_counter() - begin) / inner)
    result = {}
    for name, mine in taken.items():
        by_rank = gather(mine)
        result[name] = statistics.median(max(times) for times in zip(*by_rank, strict=True))
    return result


def machine() -> dict[str, Any]:
    """What a figure depends on: CPU, cores, kernel, versions, revision."""
    import psutil
    import torch

    import zcomm

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    git = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "zcomm": zcomm.__version__,
        "revision": git.stdout.strip() or "unknown",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class JsonLines:
    """Writes records, one JSON object a line; does nothing without a path."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
