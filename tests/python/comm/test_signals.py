"""Signal handlers that end a rank in the middle of a call: the process ends soon, and other ranks are told.

Preempted jobs do so: SIGTERM comes while the main thread waits for another rank, and the handler closes, raises or
exits. tests/cpp/coll/test_signals.cpp tests the C++ part.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zcomm
from programs import INTERRUPTED, Program, environment_of_no_job
from test_join import free_port, wait_for
from tiers import long, slow

DEADLINE_S = 60.0  # of operations: an end after a quarter of it was not caused by the signal


class Told(Exception):
    """Error that a handler raises."""


def closes(_number: int, _frame: object) -> None:
    zcomm.shutdown()


def destroys(_number: int, _frame: object) -> None:
    dist.destroy_process_group()


def exits(_number: int, _frame: object) -> None:
    sys.exit(3)


def raises(_number: int, _frame: object) -> None:
    raise Told("the handler was here")


def closes_and_exits(_number: int, _frame: object) -> None:
    zcomm.shutdown()
    sys.exit(3)


def wait_in_zcomm(call: str) -> None:
    value = torch.ones(3)
    if call == "barrier":
        zcomm.barrier()
    elif call == "recv":
        zcomm.recv(value, src=1)
    elif call == "send":
        zcomm.send(torch.ones(1 << 20), dst=1)
    elif call == "all_reduce":
        zcomm.all_reduce(value)
    elif call == "async":
        work = zcomm.all_reduce(value, async_op=True)
        assert work is not None
        work.wait()
    elif call == "async recv":
        work = zcomm.recv(value, src=1, async_op=True)
        assert work is not None
        work.wait()
    elif call == "several":
        works = [zcomm.all_reduce(value, async_op=True) for _ in range(4)]
        works[0].wait()  # type: ignore[union-attr]
    elif call == "queued":
        work = zcomm.all_reduce(value, async_op=True)
        zcomm.barrier()
    elif call == "empty":
        zcomm.empty(100)
    else:
        assert call == "split"
        zcomm.comm.job.current().split(0)


def wait_in_torch(call: str) -> None:
    value = torch.ones(3)
    if call == "barrier":
        dist.barrier()
    elif call == "recv":
        dist.recv(value, src=1)
    elif call == "all_reduce":
        dist.all_reduce(value)
    elif call == "irecv":
        dist.irecv(value, src=1).wait()  # type: ignore[union-attr]
    else:
        assert call == "async"
        work = dist.all_reduce(value, async_op=True)
        assert work is not None
        work.wait()


def told(call: Callable[..., object], *args: Any) -> tuple[str, float]:
    """Call; return the error, and the time when the call's frames and their Works are freed."""
    what = "nothing"
    try:
        call(*args)
    except BaseException as error:
        what = f"{type(error).__name__}: {error}"
    return what, time.monotonic()


def interrupted(folder: str, handler: str, call: str, backend: str) -> tuple[str, float]:
    """Make rank 0 wait in ``call`` for rank 1, which calls after rank 0's call has ended."""
    signal.signal(signal.SIGTERM, globals()[handler])
    rank = int(os.environ["RANK"])
    if backend == "torch":
        importlib.import_module("zcomm.torch_backend")
        dist.init_process_group("zcomm", init_method=f"tcp://127.0.0.1:{os.environ['PORT']}", rank=rank, world_size=2)
        dist.barrier()
    else:
        zcomm.init(backend, timeout=DEADLINE_S).barrier()
    Path(folder, f"ready{rank}").touch()
    wait_in = wait_in_torch if backend == "torch" else wait_in_zcomm
    if rank == 0:
        found = told(wait_in, call)
        Path(folder, "ended").touch()
        if handler in ("closes", "destroys"):  # the process lives on
            wait_for(Path(folder, "noticed"))
        return found
    wait_for(Path(folder, "ended"))
    started = time.monotonic()

    def go_on() -> None:
        """Make rank 0's call: its part before the signal counts; later calls cannot end."""
        if call not in ("recv", "send", "barrier", "async recv", "irecv"):
            wait_in("all_reduce" if call in ("async", "queued", "several") else call)
        for _ in range(2):
            wait_in("barrier")

    what, noticed = told(go_on)
    Path(folder, "noticed").touch()
    return what, noticed - started


def check_end(handler: str, what: str, took_s: float) -> None:
    assert took_s < DEADLINE_S / 4, (what, took_s)
    if handler in ("closes", "destroys"):
        assert what.startswith("RuntimeError: ") and "closed" in what, what
    elif handler == "raises":
        assert what == "Told: the handler was here"
    else:
        assert what == "SystemExit: 3"


def run_interrupted(
    start_ranks_in: Any, tmp_path: Path, handler: str, call: str, backend: str
) -> tuple[tuple[str, float], tuple[str, float]]:
    world = start_ranks_in(interrupted, 2, str(tmp_path), handler, call, backend, env={"PORT": str(free_port())})
    for rank in range(2):
        wait_for(tmp_path / f"ready{rank}")
        assert (tmp_path / f"ready{rank}").exists(), [result.describe() for result in world.join(DEADLINE_S)]
    time.sleep(0.5)  # rank 0 waits by now
    sent = world.kill(0, signal.SIGTERM)
    results = world.join(DEADLINE_S)
    for result in results:
        assert result.value is not None and result.exitcode == 0, result.describe()
    (what, ended), other = (result.value for result in results)
    return (what, ended - sent), other


CALLS = ["barrier", "recv", "send", "all_reduce", "async", "async recv", "several", "queued", "empty", "split"]


@pytest.mark.parametrize(
    ("handler", "call", "backend"),
    [  # `make test` has each pair of handler, call and backend
        (handler, call, backend) if (i + j + k) % 2 == 0 else long(handler, call, backend)
        for i, handler in enumerate(["closes", "exits", "raises", "closes_and_exits"])
        for j, call in enumerate(CALLS)
        for k, backend in enumerate(["shm", "tcp"])
    ],
)
def test_a_handler_ends_a_call(start_ranks_in: Any, tmp_path: Path, handler: str, call: str, backend: str) -> None:
    (what, took_s), (other, noticed_s) = run_interrupted(start_ranks_in, tmp_path, handler, call, backend)
    check_end(handler, what, took_s)
    assert other.startswith("PeerLost: ") and noticed_s < DEADLINE_S / 2, (other, noticed_s)


@pytest.mark.parametrize("call", ["barrier", "recv", "irecv", "all_reduce", "async"])
@pytest.mark.parametrize("handler", [slow("destroys"), "exits", slow("raises")])
def test_a_handler_ends_a_call_of_torch(start_ranks_in: Any, tmp_path: Path, handler: str, call: str) -> None:
    (what, took_s), (other, noticed_s) = run_interrupted(start_ranks_in, tmp_path, handler, call, "torch")
    assert took_s < DEADLINE_S / 4, (what, took_s)
    assert handler == "destroys" or what.startswith("Told" if handler == "raises" else "SystemExit"), what
    assert "nothing" not in (what, other) and noticed_s < DEADLINE_S / 2, (what, other, noticed_s)


def joins_alone(folder: str, handler: str, where: str) -> tuple[str, float]:
    signal.signal(signal.SIGTERM, globals()[handler])
    rank = int(os.environ["RANK"])
    if rank == 1 and where != "store":
        from test_join import stop_before_connecting

        stop_before_connecting(folder)
    elif rank == 1:
        wait_for(Path(folder, "done"))
        return "nothing", 0.0
    Path(folder, "ready0").touch()
    method = f"tcp://127.0.0.1:{os.environ['PORT']}" if where == "store" else f"file://{folder}/meeting"
    backend = "tcp" if where == "tcp" else "shm"
    return told(lambda: zcomm.init(backend, DEADLINE_S, rank=rank, world_size=2, init_method=method))


@pytest.mark.parametrize("where", ["store", "shm", "tcp"])
@pytest.mark.parametrize("handler", ["closes", "exits", "raises", "closes_and_exits"])
def test_a_handler_ends_init(start_ranks_in: Any, tmp_path: Path, handler: str, where: str) -> None:
    world = start_ranks_in(joins_alone, 2, str(tmp_path), handler, where, env={"PORT": str(free_port())})
    wait_for(tmp_path / "ready0")
    time.sleep(1.5)
    sent = world.kill(0, signal.SIGTERM)
    time.sleep(0.5)
    (tmp_path / "done").touch()
    result = world.join(DEADLINE_S)[0]
    assert result.value is not None, result.describe()
    what, ended = result.value
    assert ended - sent < DEADLINE_S / 2
    if handler == "closes":
        assert what == "RuntimeError: init: zcomm.shutdown() was called while this rank was joining the job"
    else:
        check_end(handler, what, ended - sent)


def shuts_down_beside_init(folder: str) -> str:
    """Shut down while another thread of rank 0 waits in init for a missing rank."""
    found: list[str] = []
    method = f"file://{folder}/meeting"
    joining = threading.Thread(
        target=lambda: found.append(
            told(lambda: zcomm.init("shm", DEADLINE_S, rank=0, world_size=2, init_method=method))[0]
        )
    )
    joining.start()
    time.sleep(0.5)
    zcomm.shutdown()
    joining.join()
    return found[0]


def test_shutdown_ends_an_init_of_another_thread(run_ranks: Any, tmp_path: Path) -> None:
    (what,) = run_ranks(shuts_down_beside_init, 1, str(tmp_path))
    assert what.startswith("RuntimeError: init: zcomm.shutdown() was called")


def drops_a_work(folder: str) -> tuple[str, float]:
    """Rank 0 drops the Work of an operation that cannot end."""
    signal.signal(signal.SIGTERM, raises)
    rank = zcomm.init("shm", DEADLINE_S).rank
    zcomm.barrier()
    Path(folder, f"ready{rank}").touch()
    if rank == 1:
        wait_for(Path(folder, "ended"))
        return told(lambda: (zcomm.barrier(), zcomm.barrier()))  # rank 0 had entered the first

    def drop() -> None:
        zcomm.barrier(async_op=True)  # dropped at once
        for _ in range(100):  # the interpreter raises a postponed error at its next check
            time.sleep(0.01)

    found = told(drop)
    Path(folder, "ended").touch()
    return found


def test_dropping_a_work_can_be_interrupted(start_ranks_in: Any, tmp_path: Path) -> None:
    world = start_ranks_in(drops_a_work, 2, str(tmp_path))
    for rank in range(2):
        wait_for(tmp_path / f"ready{rank}")
    time.sleep(0.5)
    sent = world.kill(0, signal.SIGTERM)
    results = world.join(DEADLINE_S)
    assert all(result.value is not None for result in results), results[0].describe()
    (what, ended), (other, _) = (result.value for result in results)
    assert what == "Told: the handler was here" and ended - sent < DEADLINE_S / 2
    assert other.startswith("PeerLost: ")


# ---- the end of a program that has operations in flight ----
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch, zcomm
from torch import nn

what, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
if sys.argv[3] == "exits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
else:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
zcomm.init(timeout=60)

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def held():
    work = zcomm.all_reduce(torch.ones(3), async_op=True)
    (folder / "ready").touch()
    time.sleep(100)

def trains():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    options = {"offload": "nvme", "nvme_path": folder, "share_parameters": False} if what.endswith("nvme") else {}
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=int(what[0]), **options)
    def step():
        model(torch.ones(2, 32)).sum().backward()
        opt.step()
        opt.zero_grad()
    for _ in range(3):
        step()
    zcomm.barrier()
    if rank == 0:
        (folder / "ready").touch()
    else:
        wait_for("ended")
    while True:
        step()

try:
    if rank == 0:
        held() if what == "held" else trains()
    elif what == "held":
        wait_for("ended")
        for _ in range(3):
            zcomm.all_reduce(torch.ones(3))
    else:
        trains()
except Exception as error:
    (folder / "told").write_text(type(error).__name__)
"""


@pytest.mark.parametrize("how", ["exits", "interrupted"])
@pytest.mark.parametrize("what", [slow("held"), slow("0"), slow("2"), "3", slow("3 nvme")])
def test_a_signal_ends_a_program_with_operations_in_flight(
    start_program: Callable[..., Program], tmp_path: Path, what: str, how: str
) -> None:
    """Only rank 0 enters the step, and the program calls neither shutdown nor close."""
    job = {"WORLD_SIZE": "2", "ZCOMM_INIT_METHOD": f"file://{tmp_path}/store", "ZCOMM_JOB_ID": str(tmp_path)}
    env = {**environment_of_no_job(), **job}
    ranks = [start_program(PROGRAM, what, tmp_path, how, env={**env, "RANK": str(rank)}) for rank in range(2)]
    wait_for(tmp_path / "ready")
    time.sleep(0.5)
    sent = time.monotonic()
    ranks[0].send_signal(signal.SIGTERM)
    code = ranks[0].wait(DEADLINE_S)
    took_s = time.monotonic() - sent
    (tmp_path / "ended").touch()
    ranks[1].wait(DEADLINE_S)
    assert code == (3 if how == "exits" else INTERRUPTED), ranks[0].stderr
    assert took_s < DEADLINE_S / 4, took_s
    assert (tmp_path / "told").read_text() == "PeerLost"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), [("held", "exits"), ("3 nvme", "interrupted")])
def test_a_signal_ends_an_interpreter_with_operations_in_flight(tmp_path: Path, what: str, how: str) -> None:
    """The same for a separate interpreter, which the signal ends."""
    job = {"WORLD_SIZE": "2", "ZCOMM_INIT_METHOD": f"file://{tmp_path}/store", "ZCOMM_JOB_ID": str(tmp_path)}
    env = {**environment_of_no_job(), **job, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what, str(tmp_path), how],
            env={**env, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for(tmp_path / "ready")
        time.sleep(1.0)
        sent = time.monotonic()
        ranks[0].send_signal(signal.SIGTERM)
        _, text = ranks[0].communicate(timeout=DEADLINE_S)
        took_s = time.monotonic() - sent
        (tmp_path / "ended").touch()
        ranks[1].communicate(timeout=DEADLINE_S)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == (3 if how == "exits" else -signal.SIGINT), text
    assert took_s < DEADLINE_S / 4, took_s
    assert (tmp_path / "told").read_text() == "PeerLost"


def operates_in_a_handler(folder: str) -> str:
    """Call a collective in a handler: it raises, and the interrupted call continues."""
    found: list[str] = []

    def handler(number: int, frame: types.FrameType | None) -> None:
        names = []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if "barrier" not in names:  # the signal was early, so send it again
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            return
        found.append(told(zcomm.barrier)[0])
        Path(folder, "handled").touch()

    signal.signal(signal.SIGTERM, handler)
    rank = zcomm.init("shm", DEADLINE_S).rank
    if rank == 1:
        wait_for(Path(folder, "handled"))
    else:
        Path(folder, "ready0").touch()
    zcomm.barrier()
    return found[0] if found else "nothing"


def test_a_handler_cannot_start_a_collective_within_one(start_ranks_in: Any, tmp_path: Path) -> None:
    world = start_ranks_in(operates_in_a_handler, 2, str(tmp_path))
    wait_for(tmp_path / "ready0")
    time.sleep(0.2)
    world.kill(0, signal.SIGTERM)
    first, second = (result.value for result in world.join(DEADLINE_S))
    assert "in the middle of another call" in first and second == "nothing"


def asks_beside_close(rounds: int) -> str:
    """Call memory() and no_deadline() concurrently with close() and a barrier that cannot end."""
    for _ in range(rounds):
        comm = zcomm.init("shm", DEADLINE_S)
        part = comm.duplicate()
        stop = threading.Event()

        def ask(part: Any = part, stop: threading.Event = stop) -> None:
            while not stop.is_set():
                part.memory()
                try:
                    with part.no_deadline():
                        pass
                except RuntimeError:
                    pass

        if comm.rank == 1:
            comm.barrier()
            continue
        threads = [threading.Thread(target=ask), threading.Thread(target=part.close)]
        threads[0].start()
        threading.Timer(0.01, threads[1].start).start()
        assert told(part.barrier)[0].startswith("RuntimeError")
        while threads[1].ident is None:
            time.sleep(0.001)
        threads[1].join()
        stop.set()
        threads[0].join()
        comm.barrier()
    return "done"


@pytest.mark.parametrize("rounds", [5, slow(30)])
def test_memory_beside_close(run_ranks: Any, rounds: int) -> None:
    assert run_ranks(asks_beside_close, 2, rounds) == ["done", "done"]
