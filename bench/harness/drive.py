"""Rate of a drive's reads by fio: io_uring, 16 requests of 1 MiB, past the page cache."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

_FLAGS = ("--rw=read", "--bs=1M", "--iodepth=16", "--ioengine=io_uring", "--direct=1", "--time_based")


def read_rate(file: Path, nbytes: int, seconds: float) -> float:
    """Return bytes per second of fio on ``file``, which is written first if it is missing.

    Raises: FileNotFoundError without fio; RuntimeError if it fails.
    """
    program = shutil.which("fio")
    if program is None:
        raise FileNotFoundError("no fio (Debian: fio)")
    if not file.exists():
        with open(file, "wb") as out:
            for _ in range(nbytes >> 20):
                out.write(os.urandom(1 << 20))
            os.fsync(out.fileno())
    command = [program, "--name=zcomm", f"--filename={file}", f"--runtime={seconds:g}", "--output-format=json", *_FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-400:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])
