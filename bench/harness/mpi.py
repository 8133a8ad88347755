"""The MPIs that a bench can be started by: Open MPI and MPICH, each with mpi4py in the ranks.

mpi4py's wheels load the MPI that MPI4PY_MPIABI names, so one mpi4py serves both. MPICH is looked for in $ZCOMM_MPICH (a
prefix), build/mpich, the environment of this Python (pip install mpich) and Debian's mpirun.mpich.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from harness.record import ROOT

NAMES = ("openmpi", "mpich")


@dataclass(frozen=True)
class Mpi:
    """One MPI. `launch`: the command up to the number of ranks."""

    name: str
    launch: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)

    def command(self, world_size: int, program: Sequence[str]) -> list[str]:
        return [*self.launch, "-n", str(world_size), *program]


def find(name: str, need_mpi4py: bool = True) -> Mpi | str:
    """Return the MPI of that name, or why there is none."""
    if need_mpi4py and not find_spec("mpi4py"):
        return "mpi4py is not installed (pip install mpi4py)"
    return _open_mpi() if name == "openmpi" else _mpich()


def _open_mpi() -> Mpi | str:
    for program in ("mpirun.openmpi", "mpirun"):
        path = shutil.which(program)
        if path and any(mark in _version(path) for mark in ("Open MPI", "OpenRTE")):  # by the name it is called by
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return Mpi("openmpi", [path, "--oversubscribe", "--bind-to", "none", *root], {"MPI4PY_MPIABI": "openmpi"})
    return "no mpirun of Open MPI (Debian: openmpi-bin)"


def _mpich() -> Mpi | str:
    prefixes = [Path(os.environ["ZCOMM_MPICH"])] if "ZCOMM_MPICH" in os.environ else []
    env = {"MPI4PY_MPIABI": "mpich"}
    for prefix in [*prefixes, ROOT / "build/mpich", Path(sys.prefix)]:
        if (prefix / "bin/mpiexec").exists():
            path = os.pathsep.join(filter(None, (str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH"))))
            return Mpi("mpich", [str(prefix / "bin/mpiexec"), "-bind-to", "none"], {**env, "LD_LIBRARY_PATH": path})
    system = shutil.which("mpirun.mpich")
    if system:
        return Mpi("mpich", [system, "-bind-to", "none"], env)
    return "no MPICH (set ZCOMM_MPICH to its prefix, or Debian: mpich)"


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
