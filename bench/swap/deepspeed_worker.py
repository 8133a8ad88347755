"""Worker in an interpreter that has DeepSpeed: answers each line of stdin (JSON) with the seconds that it took."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def say(answer: dict[str, Any]) -> None:
    print("zcomm-bench " + json.dumps(answer), flush=True)


def main(nbytes: int) -> None:
    try:
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        library = AsyncIOBuilder().load()
    except Exception as error:
        say({"absent": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
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
    say({})
    for line in sys.stdin:
        question = json.loads(line)
        handle = handle_of(question)
        step, path = question["tensor_nbytes"], question["file"]
        begin_s = time.perf_counter()
        for number, begin in enumerate(range(0, question["nbytes"], step)):
            writes = question["what"] == "write" or (question["what"] == "mixed" and number % 2)
            (handle.async_pwrite if writes else handle.async_pread)(buffer[begin : begin + step], path, begin)
        handle.wait()
        say({"seconds": time.perf_counter() - begin_s})


if __name__ == "__main__":
    main(int(sys.argv[1]))
