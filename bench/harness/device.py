"""The GPU of a bench: absence in one line, the device's few calls, rows for readers and for gpu-check's page.

ZCOMM_BENCH_DEVICE=cpu uses the CPU as the device, so that a machine without a GPU can test the benches; the figures
then mean nothing.
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
    """Return the torch.device of GPU ``index``; end the program if there is none."""
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
    """Return the bytes of memory of the device."""
    import torch

    if PLAYED:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(torch.cuda.get_device_properties(device).total_memory)


def synchronize() -> None:
    """Wait for all work that this process has queued on the device."""
    import torch

    if not PLAYED:
        torch.cuda.synchronize()


def make_stream(device: Any) -> Any:
    """Create a stream for copies, for ``on_stream``."""
    import torch

    return None if PLAYED else torch.cuda.Stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    import torch

    return contextlib.nullcontext() if PLAYED else torch.cuda.stream(stream)


def release() -> None:
    """Free torch's cached device memory, after its owners were freed."""
    import gc

    import torch

    gc.collect()
    if not PLAYED:
        torch.cuda.empty_cache()


def synchronized(call: Callable[[], object]) -> Callable[[], None]:
    """Return a function of ``call`` and the wait for the work that it queued on the device."""

    def run() -> None:
        call()
        synchronize()

    return run


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def available_nbytes() -> int:
    """Return the host memory that this process can still have, within its control group's limit."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            found = int(line.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        found = min(found, max(0, limit - int((group / "memory.current").read_text())))
    return found


class Rows:
    """Rows that are printed and appended to ``path`` as JSON."""

    def __init__(self, path: str | None, table: str) -> None:
        self._path, self._table = path, table
        self._before: bytes | None = None  # contents of the file at the first call of ``keep``
        self.wrong = 0

    def keep(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows so far, replacing the last call's, without printing. The file is whole at any time."""
        if not self._path:
            return
        path = Path(self._path)
        if self._before is None:
            self._before = path.read_bytes() if path.exists() else b""
        lines = "".join(json.dumps({"table": self._table, **columns}) + "\n" for columns in rows)
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(self._before + lines.encode())
        new.replace(path)

    def show(self, rows: list[dict[str, Any]]) -> None:
        """Call ``keep`` and print the rows: they are final."""
        self.keep(rows)
        for columns in rows:
            self._print(columns)

    def add(self, **columns: Any) -> None:
        self._print(columns)
        if self._path:
            with Path(self._path).open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"table": self._table, **columns}) + "\n")

    def _print(self, columns: dict[str, Any]) -> None:
        shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in columns.values())
        print("  " + "  ".join(f"{name} {value}" for name, value in zip(columns, shown, strict=True)), flush=True)
        self.wrong += int(columns.get("#wrong") or 0)
