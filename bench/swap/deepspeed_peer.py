"""DeepSpeed's aio as a peer: a process of an interpreter that has it, which times what it is asked to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_CHOICES = [
    {"block": block, "depth": depth, "threads": threads}
    for block, depth in ((_MIB, 16), (_MIB, 32), (4 * _MIB, 8))
    for threads in (1, 2, 4)
]


class DeepSpeed:
    name = "deepspeed"

    def __init__(self, nbytes: int, python: str | None) -> None:
        python = python or os.environ.get("ZCOMM_DEEPSPEED_PYTHON") or sys.executable
        self._nbytes = nbytes
        self._best: dict[str, dict[str, Any]] = {}
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))  # its ninja builds the operation
        self._worker = subprocess.Popen(
            [python, str(Path(__file__).with_name("deepspeed_worker.py")), str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "PATH": path,
                "DS_ACCELERATOR": "cpu",
                "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # huge pages for it, too
            },
        )
        answer = self._answer()
        if "absent" in answer:
            self._worker.wait()
            raise RuntimeError(answer["absent"])

    def tune(self, what: str, file: str, keep: Callable[[dict[str, object]], None]) -> dict[str, Any]:
        if what not in self._best:
            gbps = [0.0] * len(_CHOICES)
            for _ in range(2):
                for number, choice in enumerate(_CHOICES):
                    gbps[number] += self._nbytes / self._ask(what, self._nbytes, self._nbytes // 16, choice, file) / 2e9
            for choice, speed in zip(_CHOICES, gbps, strict=True):
                keep({"kind": "deepspeed", "what": what, "gbps": speed, **choice})
            self._best[what] = _CHOICES[gbps.index(max(gbps))]
        return self._best[what]

    def seconds(self, what: str, nbytes: int, tensor_nbytes: int, file: str) -> float:
        return self._ask(what, nbytes, tensor_nbytes, self._best[what], file)

    def close(self) -> None:
        if self._worker.stdin:
            self._worker.stdin.close()
        self._worker.wait()

    def _ask(self, what: str, nbytes: int, tensor_nbytes: int, choice: dict[str, Any], file: str) -> float:
        question = {"what": what, "nbytes": nbytes, "tensor_nbytes": tensor_nbytes, "file": file, **choice}
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(question) + "\n")
        self._worker.stdin.flush()
        return float(self._answer()["seconds"])

    def _answer(self) -> dict[str, Any]:
        assert self._worker.stdout is not None
        for line in self._worker.stdout:
            if line.startswith("zcomm-bench "):
                answer: dict[str, Any] = json.loads(line.removeprefix("zcomm-bench "))
                return answer
        return {"absent": f"its process ended with exit code {self._worker.wait()}"}
