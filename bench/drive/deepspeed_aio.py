"""DeepSpeed's aio as a peer: an interpreter with DeepSpeed runs this file, which times the requested passes.

As a program its folder is the first on the import path, so no file in it may be called deepspeed.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
            [python, __file__, str(nbytes)],
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


def _say(answer: dict[str, Any]) -> None:
    print("zcomm-bench " + json.dumps(answer), flush=True)


def answer_questions(nbytes: int) -> None:
    """Answer each line of stdin (JSON) with the seconds that it took."""
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        library = AsyncIOBuilder().load()
    except Exception as error:
        _say({"absent": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
        return
    handles: dict[tuple[int, int, int], Any] = {}

    def handle_of(question: dict[str, Any]) -> Any:
        form = question["block"], question["depth"], question["threads"]
        if form not in handles:
            handles[form] = library.aio_handle(form[0], form[1], False, True, form[2])
        return handles[form]

    first = library.aio_handle(1 << 20, 16, False, True, 1)
    buffer = first.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.view(torch.int64).random_()
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        handle = handle_of(question)
        step, path = question["tensor_nbytes"], question["file"]
        begin_s = time.perf_counter()
        for number, begin in enumerate(range(0, question["nbytes"], step)):
            writes = question["what"] == "write" or (question["what"] == "mixed" and number % 2)
            (handle.async_pwrite if writes else handle.async_pread)(buffer[begin : begin + step], path, begin)
        handle.wait()
        _say({"seconds": time.perf_counter() - begin_s})


if __name__ == "__main__":
    answer_questions(int(sys.argv[1]))
