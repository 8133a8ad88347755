"""Two jobs at one meeting point never become one world; each unserved rank raises an error with the cause.

Also the remains of a dead job, and ranks that join again. See [Note: one job] of zcomm.bootstrap.meeting.
"""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from programs import Program, environment_of_no_job
from test_join import free_port
from tiers import long, slow
from zcomm.bootstrap import rendezvous
from zcomm.bootstrap.meeting import Meeting, Process

Run = Callable[..., list[Any]]
Start = Callable[..., Program]


def in_a_job(job: str, rank: int, method: str, delay_s: float) -> str:
    """Join as rank ``rank`` of two, and sum numbers that only this job's ranks have."""
    time.sleep(delay_s)
    number = {"a": 1.0, "b": 10.0}[job]
    if os.environ["ZCOMM_JOB_ID"] not in ("a", "b"):
        del os.environ["ZCOMM_JOB_ID"]
    try:
        zcomm.init(timeout=6, rank=rank, world_size=2, init_method=method)
        value = torch.full((4,), number)
        zcomm.all_reduce(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert value[0] == 2 * number, f"MIXED: rank {rank} of job {job} has {value[0]}"
    return "served"


def one_of_four(method: str, delays: list[float]) -> str:
    place = int(os.environ["RANK"])
    return in_a_job("ab"[place // 2], place % 2, method, delays[place])


@pytest.mark.parametrize("delays", [[0, 0, 0, 0], slow([0, 0.3, 0.3, 0]), [0, 0, 0.3, 0.3], slow([0.3, 0, 0, 0.3])])
def test_two_jobs_at_one_port(run_ranks: Run, delays: list[float]) -> None:
    """Four processes of one parent, started by hand, so that only their numbers distinguish the jobs."""
    results = run_ranks(one_of_four, 4, f"tcp://127.0.0.1:{free_port()}", delays, check=False)
    told = [result.value if result.error is None else result.error.message for result in results]
    assert not any("MIXED" in text for text in told), told
    for job in (told[:2], told[2:]):
        assert "served" not in job or job == ["served", "served"], told
    refused = [text for text in told if "came twice" in text]
    assert refused, told
    assert all("process" in text and "on " in text for text in refused), told
    losers = [text for rank, text in enumerate(told) if rank in (0, 2) and text.startswith("OSError")]
    assert all("the port is in use" in text and "Errno 98" in text for text in losers), told


def was_refused(told: str) -> bool:
    """Return whether a late rank's error is "came twice", no answer of a departed rank 0, or a lost store.

    A store in a file is empty after its ranks have left, so rank 0 is missing. A store that rank 0 serves is lost when
    rank 0 leaves.
    """
    came_twice = "RuntimeError" in told and "came twice" in told
    left = "rank 0 does not answer" in told or "rank(s) 0 of 2 did not come" in told
    lost = "PeerLost" in told and "lost the store, which rank 0 has" in told
    return came_twice or lost or ("TimeoutError" in told and left)


def one_of_two_that_met(method: str, port_was_tried: Path) -> str:
    """Rank 0 of job a and rank 1 of job b become a world; the others join long after init() has returned.

    Rank 1 of job a joins last: its claim makes rank 0 leave. Rank 0 of job b has tried the port before.
    """
    place = int(os.environ["RANK"])
    if place == 2:
        told = in_a_job("b", 0, method, 3.0)
        port_was_tried.touch()
        return told
    if place == 1:
        while not port_was_tried.exists():
            time.sleep(0.05)
        return in_a_job("a", 1, method, 0.0)
    del os.environ["ZCOMM_JOB_ID"]
    logged = io.StringIO()
    logging.getLogger("zcomm").addHandler(logging.StreamHandler(logged))
    zcomm.init(timeout=30, rank=place % 2, world_size=2, init_method=method)
    try:
        for _ in range(600):
            zcomm.all_reduce(torch.ones(1))
            time.sleep(0.05)
    except Exception as error:
        return f"{type(error).__name__}: {error}; {logged.getvalue()}"
    return "served"


def test_ranks_of_two_jobs_that_have_met(run_ranks: Run, tmp_path: Path) -> None:
    method = f"tcp://127.0.0.1:{free_port()}"
    results = run_ranks(one_of_two_that_met, 4, method, tmp_path / "tried", check=False)
    told = [result.value if result.error is None else result.error.message for result in results]
    assert "closed" in told[0] and told[3].startswith("PeerLost") and "rank 0" in told[3], told
    assert was_refused(told[1]), told
    assert "OSError" in told[2] and "the port is in use" in told[2], told
    assert "rank 0 leaves the job: rank" in told[0] and "came twice" in told[0], told


TRAINS = """
import time
import torch, torch.distributed as dist
import zcomm, zcomm.torch_backend
from datetime import timedelta

number = {"a": 1.0, "b": 10.0}[job]
time.sleep(delay_s)
sums = mixed = 0
told = "nothing"
try:
    if kind == "torch":
        dist.init_process_group("zcomm", init_method=where, rank=rank, world_size=2, timeout=timedelta(seconds=8))
    else:
        zcomm.init(timeout=8)
    for _ in range(60):
        value = torch.full((2,), number)
        (dist if kind == "torch" else zcomm).all_reduce(value)
        sums += 1
        mixed += float(value[0]) != 2 * number
        time.sleep(0.1)
except Exception as error:
    told = f"{type(error).__name__}: {error}"
os.write(1, f"{job}{rank}|{sums}|{mixed}|{told}\\n".encode())
os._exit(0)
"""
# One job: its ranks' delays are arguments, and its processes have their own parent.
LAUNCHES = """
import os, sys
import zcomm.torch_backend  # once: ranks that import at different speeds are late
text, job, kind, where, delays, names = *sys.argv[1:5], sys.argv[5:7], sys.argv[7:9]
for rank in range(2):
    if os.fork() == 0:
        os.environ |= {names[0]: str(rank), names[1]: "2"}
        delay_s = float(delays[rank])
        exec(text)
for rank in range(2):
    os.wait()
"""


def two_jobs(
    start_program: Start, tmp_path: Path, kind: str, late_s: float, **variables: str
) -> dict[str, tuple[int, int, str]]:
    """Start rank 0 of job a and rank 1 of job b, ``late_s`` later the others; return (sums, mixed sums, error)."""
    env = {**environment_of_no_job(), "TMPDIR": str(tmp_path), **variables}
    names = ("PMI_RANK", "PMI_SIZE") if kind == "mpiexec" else ("RANK", "WORLD_SIZE")
    where = f"tcp://127.0.0.1:{free_port()}"
    if kind == "by hand":
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": where.rpartition(":")[2]}
    elif kind == "file":
        env["ZCOMM_INIT_METHOD"] = f"file://{tmp_path}/meeting"
    elif kind == "torch, file":
        kind, where = "torch", f"file://{tmp_path}/meeting"
    jobs = [
        start_program(LAUNCHES, TRAINS, job, kind, where, *delays, *names, env=env)
        for job, delays in (("a", (0, late_s)), ("b", (late_s, 0)))
    ]
    told: dict[str, tuple[int, int, str]] = {}
    for process in jobs:
        output, errors = process.communicate(timeout_s=100)
        for line in output.splitlines():
            name, sums, mixed, error = line.split("|", 3)
            told[name] = int(sums), int(mixed), error
        assert process.returncode == 0, errors
    assert len(told) == 4, told
    return told


@pytest.mark.parametrize(
    ("kind", "env"),
    [
        slow("by hand", {"SLURM_JOB_ID": "7"}),
        ("by hand", {"TORCHELASTIC_RUN_ID": "none"}),
        long("file", {}),
        long("torch", {"SLURM_JOB_ID": "7"}),
        slow("torch, file", {}),
    ],
)
def test_late_ranks_of_two_jobs_end_a_mixed_world(
    start_program: Start, tmp_path: Path, kind: str, env: dict[str, str]
) -> None:
    """An allocation's number, or torchrun's default name for unnamed jobs, does not identify a job."""
    told = two_jobs(start_program, tmp_path, kind, 1.0, **env)
    for sums, mixed, error in told.values():
        assert error != "nothing", told
        assert mixed == sums, told
        assert sums < 40, told  # of 60: the error came while the program ran
    assert was_refused(told["a1"][2]) or "PeerLost" in told["a1"][2], told
    assert told["b1"][2].startswith(("PeerLost", "RuntimeError")), told


@pytest.mark.parametrize("env", [{}, long({"SLURM_JOB_ID": "7"}), {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}], ids=str)
def test_two_mpiexec_of_one_allocation(start_program: Start, tmp_path: Path, env: dict[str, str]) -> None:
    told = two_jobs(start_program, tmp_path, "mpiexec", 1.0, **env)
    assert all(result == (60, 0, "nothing") for result in told.values()), told


@pytest.mark.slow
def test_one_job_without_a_name_is_not_disturbed(start_program: Start, tmp_path: Path) -> None:
    """Its late rank, and groups made after the default one, are not mistaken for another job."""
    told = two_jobs(start_program, tmp_path, "mpiexec", 0.0)
    assert all(result == (60, 0, "nothing") for result in told.values()), told


def makes_groups_again(method: str) -> list[float]:
    import zcomm.torch_backend  # noqa: F401

    rank, found = int(os.environ["RANK"]), []
    del os.environ["ZCOMM_JOB_ID"]
    for number in range(3):
        if rank == number % 2:
            time.sleep(0.3)
        dist.init_process_group("zcomm", init_method=method, rank=rank, world_size=2)
        part = dist.new_group([0, 1])
        value = torch.ones(1)
        dist.all_reduce(value, group=part)
        time.sleep(0.3)
        dist.all_reduce(value)
        found.append(float(value))
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_groups_that_are_made_again_are_one_job(run_ranks: Run, tmp_path: Path, scheme: str) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    assert run_ranks(makes_groups_again, 2, method) == [[4.0] * 3] * 2


def one_of_two_named_jobs(method: str) -> str:
    place = int(os.environ["RANK"])
    os.environ["ZCOMM_JOB_ID"] = job = "ab"[place // 2]
    # Only rank 0 of job a and rank 1 of job b come at first.
    return in_a_job(job, place % 2, method, 0.0 if place in (0, 3) else 2.0)


def test_two_jobs_with_names(run_ranks: Run) -> None:
    results = run_ranks(one_of_two_named_jobs, 4, f"tcp://127.0.0.1:{free_port()}", check=False)
    told = [result.value if result.error is None else result.error.message for result in results]
    for place in (0, 3):
        assert told[place].startswith("RuntimeError: init: ranks of different jobs came to tcp://"), told
        assert "is a for rank 0 (process" in told[place] and "and b for rank 1" in told[place], told
    assert not any("MIXED" in text for text in told), told


def of_another_size(method: str) -> str:
    rank = int(os.environ["RANK"])
    try:
        zcomm.init(timeout=6, rank=rank, world_size=2 + rank, init_method=method)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "served"


def test_world_sizes_that_differ_are_said(run_ranks: Run) -> None:
    """Rank 0 of two and rank 1 of three: rank 0 has all the ranks that it waits for."""
    first, _ = run_ranks(of_another_size, 2, f"tcp://127.0.0.1:{free_port()}")
    assert first.startswith("RuntimeError: init: ranks of different jobs came")
    assert "WORLD_SIZE is 2 for rank 0" in first and "and 3 for rank 1" in first


def test_a_rank_that_comes_twice_is_told_everywhere() -> None:
    store = dist.HashStore()
    stranger = dataclasses.replace(Process.own(), pid=os.getppid(), space="another kernel", node="far")
    claim = {"process": dataclasses.asdict(stranger), "world_size": 2, "job": "", "mine": {}}
    store.set("rank1", json.dumps(claim))
    found: dict[int, str] = {}

    def arrive(rank: int) -> None:
        meeting = Meeting(store, rank, 2, time.monotonic() + 20, "the store", 20, "")
        with pytest.raises(RuntimeError) as caught:
            meeting.arrive({}, 2.0)
        found[rank] = str(caught.value)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = f"init: rank 1 of 2 came twice to the store: process {os.getppid()} on far, and {Process.own()}."
    assert found[0] == found[1] and found[0].startswith(wanted)


def test_the_port_of_another_program_is_said() -> None:
    import errno
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(OSError, match=f"rank 0 cannot serve tcp://127.0.0.1:{port}: the port is in use") as caught:
            zcomm.init(timeout=30, rank=0, world_size=2, init_method=f"tcp://127.0.0.1:{port}")
        assert time.monotonic() - started < 15, "the error does not wait for the deadline"
    assert caught.value.errno == errno.EADDRINUSE and "MASTER_PORT of its own" in str(caught.value)


# ---- one job that joins again ----
def joins_again(method: str, rounds: int) -> list[float]:
    rank = int(os.environ["RANK"])
    found = []
    for number in range(rounds):
        if rank == number % 2:
            time.sleep(0.2)
        zcomm.init(timeout=30, rank=rank, world_size=2, init_method=method)
        value = torch.ones(1)
        zcomm.all_reduce(value)
        found.append(float(value))
        zcomm.shutdown()
    return found


@pytest.mark.parametrize("scheme", ["tcp", "file"])
def test_ranks_join_again(run_ranks: Run, tmp_path: Path, scheme: str) -> None:
    method = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{tmp_path}/meeting"
    assert run_ranks(joins_again, 2, method, 3) == [[2.0] * 3] * 2


# ---- remains of a dead job ----
def joins_and_dies(method: str, dies: bool) -> float:
    if dies and os.environ["RANK"] == "1":
        rendezvous.enter = lambda *_: os._exit(7)  # type: ignore[assignment]
    zcomm.init("shm", timeout=8 if dies else 40, rank=int(os.environ["RANK"]), world_size=2, init_method=method)
    value = torch.ones(1)
    zcomm.all_reduce(value)
    return float(value)


def test_a_file_that_a_dead_job_has_left(run_ranks: Run, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/meeting"
    first = run_ranks(joins_and_dies, 2, method, True, check=False)
    assert first[1].exitcode == 7 and first[0].error is not None
    assert (tmp_path / "meeting").exists(), "the test needs what a dead rank leaves"
    started = time.monotonic()
    assert run_ranks(joins_and_dies, 2, method, False) == [2.0, 2.0]
    assert time.monotonic() - started < 30


# ---- ranks from torch.distributed's group ----
def joins_beside_torch(method: str, by_engine: bool) -> tuple[int, float]:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ZCOMM_INIT_METHOD"):
        del os.environ[name]
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    if by_engine:
        import zcomm.compat.deepspeed as deepspeed

        deepspeed.initialize(
            model=torch.nn.Linear(4, 4),
            config={"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
            dist_init_required=False,
        )
    else:
        zcomm.init(timeout=30)
    value = torch.ones(1)
    zcomm.all_reduce(value)
    dist.destroy_process_group()
    return zcomm.rank(), float(value)


@pytest.mark.parametrize("by_engine", [False, True])
def test_a_group_of_torch_is_joined(run_ranks: Run, by_engine: bool) -> None:
    found = run_ranks(joins_beside_torch, 2, f"tcp://127.0.0.1:{free_port()}", by_engine)
    assert found == [(0, 2.0), (1, 2.0)]


# ---- processes between mpirun and the rank ----
WRAPPED = """
import json, os, sys
from zcomm.bootstrap import rendezvous
kept = dict(os.environ)
for job in map(json.loads, sys.argv[1:]):
    os.environ.clear()
    os.environ.update(kept | job)
    print(rendezvous.find_job(None, None, None).init_method)
"""
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}


def meeting_points(jobs: list[dict[str, str]], wrapped: bool, **variables: str) -> list[str]:
    """Return the meeting point of a rank of each of ``jobs``, found by one interpreter with ``variables``."""
    command = [sys.executable, "-c", WRAPPED, *map(json.dumps, jobs)]
    if wrapped:
        command = ["sh", "-c", '"$@"; exit $?', "wrapper", *command]
    env = {**environment_of_no_job(), **variables}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
def test_ranks_behind_a_wrapper_meet_the_others() -> None:
    names = [{"PMIX_NAMESPACE": "123@1"}, {"SLURM_JOB_ID": "7"}, {"ZCOMM_JOB_ID": "x"}, {}]
    plain, wrapped = (meeting_points(names, wrapped, **OPEN_MPI) for wrapped in (False, True))
    assert plain == wrapped and all(point.startswith("file://") for point in plain), (plain, wrapped)
    assert plain[0] != plain[1], "a name of the job leads elsewhere"


@pytest.mark.slow
def test_steps_of_one_slurm_job_are_jobs_of_their_own() -> None:
    steps = [{"SLURM_STEP_ID": "0"}, {"SLURM_STEP_ID": "1"}]
    plain, wrapped = (meeting_points(steps, wrapped, **SLURM) for wrapped in (False, True))
    assert plain[0] != plain[1]
    assert plain == wrapped
