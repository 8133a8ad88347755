"""Absence said in one line, the device's few calls, rows for humans and for gpu-check's page.

ZCOMM_BENCH_DEVICE=cpu lets the CPU play the device, so that a machine without a GPU can test what the benches do; the
figures then mean nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SKIPPED = 77  # tools/gpucheck reads it
PLAYED = os.environ.get("ZCOMM_BENCH_DEVICE") == "cpu"


def absent(why: str) -> NoReturn:
    print(f"skipped: {why}")
    sys.exit(SKIPPED)


def device_or_absent(index: int = 0) -> Any:
    """torch.device of GPU ``index``; ends the program where there is none."""
    import torch

    if PLAYED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        absent(f"torch {torch.__version__} sees no CUDA device here")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def device_name(device: Any) -> str:
    import torch

    return "the CPU, playing a device" if PLAYED else str(torch.cuda.get_device_name(device))


def device_nbytes(device: Any) -> int:
    """Memory of the device."""
    import torch

    if PLAYED:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.cuda.get_device_properties(device).total_memory)


def synchronize() -> None:
    """Waits for all that this process has put on the device."""
    import torch

    if not PLAYED:
        torch.cuda.synchronize()


def make_stream(device: Any) -> Any:
    """A stream to copy on, for ``on_stream``."""
    import torch

    return None if PLAYED else torch.cuda.Stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    import torch

    return contextlib.nullcontext() if PLAYED else torch.cuda.stream(stream)


def release() -> None:
    """Give back what torch keeps of the device's memory, after its owners are gone."""
    import gc

    import torch

    gc.collect()
    if not PLAYED:
        torch.cuda.empty_cache()


def synchronized(call: Callable[[], object]) -> Callable[[], None]:
    """``call``, and the wait for all that it put on the device."""

    def run() -> None:
        call()
        synchronize()

    return run


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Rows:
    """Prints each row, and appends it to ``path`` as JSON."""

    def __init__(self, path: str | None, table: str) -> None:
        self._path, self._table = path, table
        self.wrong = 0

    def add(self, **columns: Any) -> None:
        shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in columns.values())
        print("  " + "  ".join(f"{name} {value}" for name, value in zip(columns, shown, strict=True)), flush=True)
        self.wrong += int(columns.get("#wrong") or 0)
        if self._path:
            with Path(self._path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"table": self._table, **columns}) + "\n")
