"""Fixtures of all Python tests: worlds of processes, a time limit with stacks, and a check for leftovers.

`run_ranks(function, world_size, *args)` returns each rank's value and fails the test if a rank raised or died;
with `check=False` it returns the RankResults, errors included. `start_ranks_in` returns the running world.
`start_program(text, *args)` runs a separate program, without an interpreter's start (support/programs.py).
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import budget
import simulated
import sizes
import zcomm
from limits import Limit
from programs import Program
from ranks import World, start_ranks

HERE = Path(__file__).parent
torch.set_num_threads(1)  # as the ranks, because spinning threads of several workers are slow on few cores
FOREIGN_SHM = (
    "deepspeed_",
    "vader_segment",
    "mpich_shm_",
    "psm_",
    "sem.",
    "cuda.shm.",
    "nccl-",
)  # names that MPI libraries, multiprocessing, CUDA's events between processes and NCCL use in /dev/shm


# Tests of process life and of concurrent processes: on a busy machine the kernel's schedule of processes is a part of
# their outcome.
PROCESS_LIFE = ("bootstrap/", "bench/", "cli/test_demo", "cli/test_gpus", "cli/test_launch", "cli/test_profile")
PROCESS_LIFE += ("cli/test_nodes", "cli/test_real_nodes")
PROCESS_LIFE += ("comm/test_comm_failures", "comm/test_deadline", "comm/test_late_ranks", "comm/test_signals")
PROCESS_LIFE += ("torch_backend/test_torch_backend_failures", "zero/test_faults", "zero/test_forked")
PROCESS_LIFE += ("zero/test_hop_faults",)
PROCESS_LIFE += ("zero/checkpoint/test_kill", "zero/checkpoint/test_swap_faults", "cli/test_top")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a failed test of PROCESS_LIFE run once more; pytest counts it as "rerun". A wrong number fails at once.

    Raises: UsageError for two files of one name, because a rank process would import the first one for both.
    """
    first: dict[str, Path] = {}
    for item in items:
        other = first.setdefault(item.path.name, item.path)
        if other != item.path:
            raise pytest.UsageError(f"{item.path} has the name of {other}: rename one of them")
        if item.path.is_relative_to(HERE) and str(item.path.relative_to(HERE)).startswith(PROCESS_LIFE):
            item.add_marker(pytest.mark.flaky(reruns=1, rerun_except=["MIXED", "mixed", "wrong"]))


def pytest_configure(config: pytest.Config) -> None:
    budget.configure(config)


def pytest_collection_finish() -> None:
    """Exclude the objects of torch and of all tests from garbage collections during tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def time_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after its Limit (`timeout_s` marker, 240 s) with the stacks of all threads."""
    marker = request.node.get_closest_marker("timeout_s")
    seconds = float(marker.args[0]) if marker else 240.0
    limit = Limit(seconds)

    def expire(_number: int, _frame: object) -> None:
        if left_s := limit.left_s():
            signal.setitimer(signal.ITIMER_REAL, left_s)
            return
        with tempfile.TemporaryFile("w+") as stacks:
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            stacks.seek(0)
            pytest.fail(f"longer than {seconds:g} s; stacks:\n{stacks.read()}", pytrace=False)

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: no process, no thread, no file in /dev/shm, and no swap directory under tmp_path is left.

    The fixture ends a job of one process and a simulated device.
    """
    processes, threads, shm = _descendants(), _threads(), _shared_memory()
    folder: Path | None = None
    if "tmp_path" in request.fixturenames and request.node.get_closest_marker("leaves_swap") is None:
        folder = request.getfixturevalue("tmp_path")
    had_group, had_job = torch.distributed.is_initialized(), zcomm.is_initialized()
    yield
    simulated.stop()
    if zcomm.is_initialized() and not had_job:
        zcomm.shutdown()
    if torch.distributed.is_initialized() and not had_group:  # from deepspeed.initialize
        torch.distributed.destroy_process_group()
    _drop_saved_tensors_hooks()
    _expect_gone(lambda: _descendants() - processes, "processes left behind")
    _expect_gone(lambda: _threads() - threads, "threads left behind")
    _expect_gone(lambda: _shared_memory() - shm, "left in /dev/shm")
    if folder is not None:
        _expect_gone(lambda: set(folder.rglob("*zcomm-swap-*")), "swap directories left behind")


@pytest.fixture(autouse=True)
def usual_sizes() -> Iterator[None]:
    """Check that a test leaves the sizes of tiles and windows unchanged. Only a rank may keep smaller ones."""
    with sizes.restored():
        before = sizes.current()
        yield
        assert sizes.current() == before, f"sizes left behind: {sizes.current()}, before {before}"


@pytest.fixture(scope="module")
def world_of_one() -> Iterator[None]:
    """Yield this process, initialized for all tests of a file."""
    zcomm.init()
    yield
    zcomm.shutdown()


@pytest.fixture
def start_ranks_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., World]]:
    """`start(function, world_size, *args, env=None) -> World`; the end of the test kills worlds that still run."""
    worlds: list[World] = []

    def start(function: Callable[..., Any], world_size: int, *args: Any, env: dict[str, str] | None = None) -> World:
        worlds.append(start_ranks(function, world_size, args, tmp_path_factory.mktemp("world"), env))
        return worlds[-1]

    yield start
    for world in worlds:
        world.close()


@pytest.fixture
def run_ranks(start_ranks_in: Callable[..., World]) -> Callable[..., list[Any]]:
    """`run(function, world_size, *args, timeout_s=200, env=None, check=True)`; see the head of this file."""

    def run(
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 200.0,
        env: dict[str, str] | None = None,
        check: bool = True,
    ) -> list[Any]:
        results = start_ranks_in(function, world_size, *args, env=env).join(timeout_s)
        if not check:
            return results
        bad = [result for result in results if result.error is not None or result.exitcode != 0]
        if bad:
            pytest.fail("\n".join(result.describe() for result in bad), pytrace=False)
        return [result.value for result in results]

    return run


@pytest.fixture
def start_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Program]]:
    """`start(text, *args, env=None) -> Program`; the end of the test kills programs that still run."""
    programs: list[Program] = []

    def start(text: str, *args: Any, env: dict[str, str] | None = None) -> Program:
        programs.append(Program(text, args, tmp_path_factory.mktemp("program"), env))
        return programs[-1]

    yield start
    for program in programs:
        program.close()


def _drop_saved_tensors_hooks() -> None:
    """Pop hooks that an interrupted forward left on this thread; in a program zero_grad() pops them."""
    graph: Any = torch._C._autograd
    top = getattr(graph, "_top_saved_tensors_default_hooks", None)  # torch >= 2.7
    while top is not None and top(True) is not None:
        graph._pop_saved_tensors_default_hooks()


def _descendants() -> set[psutil.Process]:
    """Return children of this process, zombies included, except the fork server and its resource tracker."""
    found: set[psutil.Process] = set()
    if not _may_have_descendants():
        return found
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        server = "multiprocessing.forkserver" in command or "multiprocessing.resource_tracker" in command
        if not (server and process.ppid() == os.getpid()):  # a rank has the server's command line, but another parent
            found.add(process)
    return found


def _may_have_descendants() -> bool:
    """Return whether a search through all processes of the machine is worth its time."""
    servers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # type: ignore[attr-defined]
    try:
        own = _children(os.getpid())
        return bool(own - servers) or any(_children(pid) for pid in own & servers)
    except OSError:  # a kernel without these files
        return True


def _children(pid: int) -> set[int | None]:
    return {int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()}


def _threads() -> set[threading.Thread]:
    """Return threads that Python started, because entries of others (autograd's device threads) are permanent.

    A rank's page thread lives as long as its job, and tqdm's monitor, started by torch's compiler, is permanent."""
    every = {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    return {thread for thread in every if thread.name not in ("zcomm-page", "tqdm_monitor")}


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if not name.startswith(FOREIGN_SHM)}


def _expect_gone(find: Callable[[], set[Any]], what: str) -> None:
    deadline = time.monotonic() + 3.0
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"{what}: {left}"
