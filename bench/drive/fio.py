"""fio as the roof: the best flags of a sweep, then one run each round.

Its memory must be as good as zcomm's, or the roof is too low. So malloc is set to request huge pages (glibc >= 2.35).
If the system has reserved huge pages (vm.nr_hugepages), they are tried, too. It runs on the data file of the variant
that it is compared with, because two files on one drive may differ by 20 %.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

_KIB, _MIB = 1 << 10, 1 << 20
_RW = {"write": "write", "read": "read", "mixed": "rw"}


def flags(sweep: str) -> list[dict[str, Any]]:
    """Return flags of io_uring and libaio; `full`: blocks of 256 KiB to 4 MiB, block x depth of 4 to 32 MiB."""
    blocks = (256 * _KIB, 512 * _KIB, _MIB, 2 * _MIB, 4 * _MIB)
    windows = (4 * _MIB, 8 * _MIB, 16 * _MIB, 32 * _MIB)
    memories = ["thp", "malloc"]
    if sweep == "short":
        blocks, windows, memories = (256 * _KIB, _MIB, 4 * _MIB), (16 * _MIB, 32 * _MIB), ["thp"]
    if _free_huge_nbytes() >= 64 * _MIB:
        memories.append("shmhuge")
    return [
        {"ioengine": engine, "bs": block, "iodepth": window // block, "mem": memory}
        for memory in memories
        for engine in ("io_uring", "libaio")
        for block in blocks
        for window in windows
    ]


def _free_huge_nbytes() -> int:
    text = Path("/proc/meminfo").read_text()
    numbers = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines()}
    return numbers.get("HugePages_Free", 0) * numbers.get("Hugepagesize", 0) * _KIB


class Fio:
    name = "fio"

    def __init__(self, nbytes: int, sweep: str) -> None:
        self._program = shutil.which("fio")
        if self._program is None:
            raise FileNotFoundError("no fio (Debian: fio)")
        self._sweep = sweep
        self._best: dict[str, dict[str, Any]] = {}
        self._nbytes = nbytes

    def tune(self, what: str, file: str, keep: Callable[[dict[str, object]], None]) -> dict[str, Any]:
        """Try each flag set twice, the whole list and then again; return the best mean's."""
        if what not in self._best:
            choices = flags(self._sweep)
            gbps = [0.0] * len(choices)
            for _ in range(2):
                for number, choice in enumerate(choices):
                    gbps[number] += self._nbytes / self._run(what, choice, self._nbytes, file) / 2e9
            for choice, speed in zip(choices, gbps, strict=True):
                keep({"kind": "fio", "what": what, "gbps": speed, **choice})
            self._best[what] = choices[gbps.index(max(gbps))]
        return self._best[what]

    def seconds(self, what: str, nbytes: int, tensor_nbytes: int, file: str) -> float:
        """Return the seconds with the best flags; the size of a batch's tensors has no effect on fio."""
        return self._run(what, self._best[what], nbytes, file)

    def close(self) -> None:
        """Do nothing, because fio creates no file."""

    def _run(self, what: str, choice: dict[str, Any], nbytes: int, file: str) -> float:
        command = [str(self._program), "--name=zcomm", f"--filename={file}", f"--size={nbytes}", "--direct=1"]
        command += [f"--rw={_RW[what]}", "--rwmixread=50", "--numjobs=1", "--output-format=json", "--randrepeat=0"]
        thp = choice["mem"] == "thp"
        command += [f"--{name}={'malloc' if value == 'thp' else value}" for name, value in choice.items()]
        env = {**os.environ, **({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if thp else {})}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if done.returncode:
            raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-400:]}")
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if job["error"]:
            raise RuntimeError(f"fio failed with errno {job['error']}")
        return float(job["job_runtime"]) / 1e3
