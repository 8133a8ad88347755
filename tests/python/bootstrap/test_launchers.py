"""One script under every launcher: torchrun, mpirun, `zcomm run`, and an explicit rank and rendezvous."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, torch, zcomm
torch.set_num_threads(1)
zcomm.init(timeout=60.0)
tensor = torch.arange(1000, dtype=torch.float32) * (zcomm.rank() + 1)
zcomm.all_reduce(tensor)
factor = sum(range(1, zcomm.world_size() + 1))
assert torch.equal(tensor, torch.arange(1000, dtype=torch.float32) * factor)
places = zcomm.all_gather(torch.tensor([zcomm.rank(), zcomm.local_rank()]))
result = {"rank": zcomm.rank(), "world_size": zcomm.world_size(), "places": places.tolist()}
with open(f"result{zcomm.rank()}.json", "w") as file:  # lines on a shared stdout may be torn apart
    json.dump(result, file)
zcomm.barrier()
zcomm.shutdown()
assert not zcomm.is_initialized()
"""

# Variables of a launcher that may have started this test run.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "ZCOMM_INIT")


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return {**kept, "OMP_NUM_THREADS": "1"}


def run_script(command: list[str], tmp_path: Path) -> list[dict[str, Any]]:
    """Run `command` + script; return each rank's result, by rank."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    run = subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment(),
        cwd=tmp_path,
    )
    assert run.returncode == 0, f"exit code {run.returncode}\n{run.stdout}\n{run.stderr}"
    return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("result*.json"))]


def check_two_ranks(results: list[dict[str, Any]]) -> None:
    assert [result["rank"] for result in results] == [0, 1]
    for result in results:
        assert result["world_size"] == 2
        assert result["places"] == [0, 0, 1, 1], "rank and local_rank of both ranks"


def test_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    check_two_ranks(run_script(command, tmp_path))


def test_mpirun(tmp_path: Path) -> None:
    mpirun = shutil.which("mpirun.openmpi") or shutil.which("mpirun")  # MPICH's wheel has an mpirun, too
    if mpirun is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        pytest.skip(f"mpirun is not Open MPI's: {version.splitlines()[:1]}")
    command = [mpirun, "-n", "2", "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    check_two_ranks(run_script([*command, sys.executable], tmp_path))


def test_zcomm_run(tmp_path: Path) -> None:
    check_two_ranks(run_script([sys.executable, "-m", "zcomm.cli.main", "run", "-n", "2"], tmp_path))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- without a launcher: a rank's environment has only a test's variables ----
def forget_launcher() -> int:
    """Return this rank's number, and remove the variables that named it."""
    rank = int(os.environ["RANK"])
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]
    return rank


def join(init_method: str) -> list[float]:
    import torch

    import zcomm

    rank = forget_launcher()
    comm = zcomm.init(rank=rank, world_size=2, init_method=init_method)
    assert (comm.rank, comm.world_size) == (rank, 2)
    tensor = torch.full((3,), float(rank + 1))
    zcomm.all_reduce(tensor)
    return tensor.tolist()


def test_explicit_file_rendezvous(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert run_ranks(join, 2, f"file://{tmp_path}/store") == [[3.0] * 3] * 2


def test_explicit_tcp_rendezvous(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(join, 2, f"tcp://127.0.0.1:{free_port()}") == [[3.0] * 3] * 2


def join_by_variables(rank_name: str, size_name: str, port: int) -> list[int]:
    import torch

    import zcomm

    rank = forget_launcher()
    os.environ.update({rank_name: str(rank), size_name: "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    zcomm.init(timeout=60.0)
    return zcomm.all_gather(torch.tensor([zcomm.rank(), zcomm.local_rank()])).tolist()


@pytest.mark.parametrize("names", [("PMI_RANK", "PMI_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")], ids=["mpich", "slurm"])
def test_variables_of_other_launchers(names: tuple[str, str], run_ranks: Callable[..., list[Any]]) -> None:
    """MPICH and Slurm need not be installed, because zcomm reads only their variables."""
    assert run_ranks(join_by_variables, 2, *names, free_port()) == [[0, 0, 1, 1]] * 2


def be_alone() -> tuple[int, int, int]:
    import zcomm

    forget_launcher()
    comm = zcomm.init()
    return comm.rank, comm.world_size, zcomm.local_rank()


def test_no_launcher_is_a_world_of_one(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(be_alone, 1) == [(0, 1, 0)]
