"""Rate of a drive's reads by fio, with idle cores and with a busy one.

A virtual machine's drive may be slow while its cores are idle, because each completion has to wake one. One core that
computes made fio 2.4 times as fast on such a machine. A program that computes while it reads is compared with the
better rate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_FLAGS = ("--rw=read", "--bs=1M", "--iodepth=16", "--ioengine=io_uring", "--direct=1", "--time_based")


def read_rates(file: Path, nbytes: int, seconds: float) -> dict[str, float]:
    """Return bytes per second of fio on ``file``, which is written first if it is missing: idle, busy.

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
    found = {"idle": _rate(command)}
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found["busy"] = _rate(command)
    finally:
        spinner.kill()
        spinner.wait()
    return found


def _rate(command: list[str]) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fio failed: {done.stderr.strip() or done.stdout.strip()[-400:]}")
    return float(json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"])
