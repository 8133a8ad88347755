"""Start of the ranks of a bench: the same script again, as child processes or under an mpirun."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

from harness.link import Link
from harness.mpi import Mpi
from harness.record import ROOT

FOLDER = "ZCOMM_BENCH_FOLDER"  # where the ranks of one run meet
MPI = "ZCOMM_BENCH_MPI"  # the MPI that started them, if any
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def use_project_python() -> None:
    """Go on in the project's .venv when the interpreter at hand has no zcomm."""
    from importlib.util import find_spec

    if find_spec("zcomm") and find_spec("torch"):
        return
    python = ROOT / ".venv/bin/python"
    if not python.exists() or Path(sys.prefix) == ROOT / ".venv":
        sys.exit("zcomm is not installed here; `make setup` builds it in .venv")
    os.execv(python, [str(python), *sys.argv])


def is_rank() -> bool:
    """Return True if a launcher (ours, torchrun or mpirun) has started this process as a rank."""
    return any(rank in os.environ for rank, _ in _LAUNCHERS)


def place() -> tuple[int, int]:
    """Return rank and world size, as the launcher has set them."""
    return next((int(os.environ[rank]), int(os.environ[size])) for rank, size in _LAUNCHERS if rank in os.environ)


def leave(code: int) -> NoReturn:
    """End a rank without taking the interpreter apart.

    Groups of torch that something still holds keep Gloo's threads alive until then. One that drops a tensor while
    Python ends aborts the process (torch 2.13, about one exit in 700 on a busy machine). MPI ends with the interpreter.
    """
    if "mpi4py.MPI" in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(world_size: int, timeout_s: float, mpi: Mpi | None = None, link: Link | None = None) -> int:
    """Run this script again as `world_size` ranks; return 0, or 1 if one failed or time ran out. No rank outlives it.

    link: the two hosts of the ranks (None: they are on one host)."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # so that ranks are ended, too
    with tempfile.TemporaryDirectory(prefix="zcomm-bench-") as folder:
        env = {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "ZCOMM_INIT_METHOD": f"file://{folder}/store",
            FOLDER: folder,
        }
        env |= link.env if link else {}
        program = [sys.executable, *sys.argv]
        if mpi:
            env |= {**mpi.env, MPI: mpi.name}
            groups = [subprocess.Popen(mpi.command(world_size, program), env=env, start_new_session=True)]
        else:
            groups = [
                subprocess.Popen(
                    [*(link.command(rank) if link else ()), *program],
                    env=env | _variables(rank, world_size, link.per_host if link else world_size),
                    start_new_session=True,
                )
                for rank in range(world_size)
            ]
        try:
            return _wait_for_all(groups, timeout_s, mpi.launch[0] if mpi else None)
        except KeyboardInterrupt:
            return 130
        finally:
            _end(groups)


def _variables(rank: int, world_size: int, per_host: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % per_host),
        "LOCAL_WORLD_SIZE": str(per_host),
    }


def _wait_for_all(processes: list[subprocess.Popen[bytes]], timeout_s: float, launcher: str | None) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                print(f"{launcher or f'rank {rank}'} ended with exit code {code}", file=sys.stderr)
                time.sleep(1.0)  # let the others print their error
                return 1
        if all(code == 0 for code in codes):
            return 0
        if time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            print(f"{launcher or f'ranks {running}'} still ran after {timeout_s:g} s", file=sys.stderr)
            return 1
        time.sleep(0.05)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End all ranks: mpirun forwards SIGTERM to its ranks; processes that remain after a moment are killed."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(3.0)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: only this rank or mpirun
            process.wait()
