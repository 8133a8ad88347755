"""Joining a job: hosts, choice of a backend and of an address, and each cause that keeps a rank from joining."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import zcomm
from thread_world import thread_world
from zcomm.bootstrap import departure, rendezvous
from zcomm.bootstrap import hosts as _hosts
from zcomm.bootstrap.auth import derive_key
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.hosts import Hosts, choose_address
from zcomm.bootstrap.join import Group, Joined, Settings
from zcomm.machine.process import Process

Run = Callable[..., list[Any]]


def hosts_of(names: str) -> Hosts:
    return Hosts.of(list(names), ["machine"] * len(names))


# ---- hosts ----
def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    hosts = hosts_of("babbac")
    assert hosts.of_rank == (0, 1, 0, 0, 1, 2) and hosts.count == 3 and hosts.one_machine
    assert [hosts.local_rank(rank) for rank in range(6)] == [0, 0, 1, 2, 1, 0]
    assert [hosts.local_world_size(rank) for rank in range(6)] == [3, 2, 3, 3, 2, 1]
    assert hosts.describe() == "3 hosts with 3, 2 and 1 ranks"
    assert hosts.of_ranks([4, 5, 1]).of_rank == (0, 1, 0)
    assert hosts_of("aabb").describe() == "2 hosts x 2 ranks" and hosts_of("aa").describe() == "1 host"


def test_ranks_of_different_machines_are_never_one_host() -> None:
    """Two machines with the same ZCOMM_HOST_ID do not share memory."""
    hosts = Hosts.of(["same", "same"], ["m0", "m1"])
    assert hosts.count == 2 and not hosts.one_machine


@pytest.mark.parametrize(
    ("names", "requested", "backend"),
    [
        ("a", "auto", "shm"),
        ("a", "tcp", "shm"),
        ("aa", "auto", "shm"),
        ("aa", "shm", "shm"),
        ("aa", "hierarchical", "shm"),
        ("aa", "tcp", "tcp"),
        ("ab", "auto", "tcp"),
        ("aab", "auto", "tcp"),
        ("aabb", "auto", "hierarchical"),
        ("abab", "auto", "hierarchical"),
        ("aabb", "tcp", "tcp"),
        ("aabb", "hierarchical", "hierarchical"),
        ("aabb", "shm", None),
        ("aab", "hierarchical", None),
        ("ab", "hierarchical", None),
    ],
)
def test_choice_of_a_backend(names: str, requested: str, backend: str | None) -> None:
    group = Group("init", 0, hosts_of(names), requested, derive_key(b""), Deadlines.exactly(1.0), Settings())
    if backend is not None:
        assert group.backend == backend
    else:
        with pytest.raises(ValueError, match=f"{requested}.*hosts.*use 'auto'"):
            assert group.backend


def join_two_hosts(backend: str) -> None:
    os.environ["ZCOMM_HOST_ID"] = f"host{os.environ['RANK']}"
    zcomm.init(backend, timeout=20)


def test_shm_is_refused_between_hosts(run_ranks: Run) -> None:
    for result in run_ranks(join_two_hosts, 2, "shm", check=False):
        assert result.error is not None and result.error.kind == "ValueError", result.describe()
        assert "rank 1 is on another host than rank 0" in result.error.message


# ---- addresses ----
def test_choice_of_an_address() -> None:
    assert choose_address(True, "192.0.2.77", {}) == "127.0.0.1"
    assert choose_address(False, "192.0.2.77", {"ZCOMM_HOST_ADDRESS": "10.1.2.3"}) == "10.1.2.3"
    assert choose_address(False, None, {"ZCOMM_HOST_ADDRESS": "fd00:0::1"}) == "fd00::1"
    assert choose_address(False, None, {"ZCOMM_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert _hosts.interface_of("127.0.0.1") == "lo"
    with pytest.raises(ValueError, match=r"ZCOMM_SOCKET_IFNAME=no-such-card: this host has .*lo"):
        choose_address(False, None, {"ZCOMM_SOCKET_IFNAME": "no-such-card"})
    with pytest.raises(ValueError, match="ZCOMM_HOST_ADDRESS=myself"):
        choose_address(False, None, {"ZCOMM_HOST_ADDRESS": "myself"})


def test_loopback_is_no_address_for_other_hosts() -> None:
    """The route to a master on this host starts at loopback, so another interface is searched."""
    own = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    try:
        found = choose_address(False, "localhost", {})
    except OSError as error:
        assert "ZCOMM_SOCKET_IFNAME" in str(error)
    else:
        assert found in own and not found.startswith("127.")


@pytest.mark.parametrize("text", ["5000", "0-10", "10-9", "60000-70000", "a-b", "-"])
def test_a_bad_port_range_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="ZCOMM_PORT_RANGE"):
        _hosts.port_range({"ZCOMM_PORT_RANGE": text})


def test_a_port_of_the_range_is_taken() -> None:
    from zcomm.bootstrap.tcp import TcpListener

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="ZCOMM_PORT_RANGE") as caught:
            TcpListener("127.0.0.1", range(port, port + 1))
        assert caught.value.errno == errno.EADDRINUSE
        with contextlib.closing(TcpListener("127.0.0.1", range(port, min(port + 100, 65536)))) as door:
            assert port < door.endpoint[1] < port + 100


def test_a_port_of_the_range_that_the_last_job_used() -> None:
    """The last job's connections stay in TIME_WAIT for a minute, which must not keep the port from the next job."""
    from zcomm.bootstrap.tcp import TcpListener

    port = free_port()
    with contextlib.closing(TcpListener("127.0.0.1", range(port, port + 1))) as door:
        caller = socket.create_connection(door.endpoint)
        time.sleep(0.05)
        accepted, _ = door.socket.accept()
        accepted.close()  # this side closes first
        caller.close()
    with contextlib.closing(TcpListener("127.0.0.1", range(port, port + 1))) as door:
        assert door.endpoint[1] == port
        with pytest.raises(OSError, match="no free port"):
            TcpListener("127.0.0.1", range(port, port + 1))


# ---- rank and world size ----
def job_of(**env: str) -> rendezvous.Job:
    return rendezvous.find_job(None, None, None, env)


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"RANK": "1"}, "RANK='1' is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set, but RANK is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK='1' is set, but OMPI_COMM_WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x' is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, "MASTER_PORT='99999': expected"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "0"}, "MASTER_PORT='0': expected"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT='x': expected"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, "MASTER_ADDR='h' is set, but MASTER_PORT is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_PORT='1' is set, but MASTER_ADDR is not"),
    ],
)
def test_variables_that_cannot_be_right_are_named(env: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        job_of(**env)


def test_half_of_one_launcher_beside_another() -> None:
    job = job_of(RANK="5", PMI_RANK="0", PMI_SIZE="2", ZCOMM_INIT_METHOD="file:///nowhere")
    assert (job.rank, job.world_size, job.launcher) == (0, 2, "MPICH")
    assert job_of(SLURM_PROCID="0").world_size == 1, "a batch script, not a step"


MV2 = {"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_SIZE": "8", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
PMI = {"PMI_RANK": "5", "PMI_SIZE": "8"}


@pytest.mark.parametrize(
    ("env", "launcher"),
    [
        ({**PMI, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}, "MPICH"),  # also of Intel MPI
        ({**PMI, "PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PMI_LOCAL_RANK": "1"}, "MPICH"),
        (MV2, "MVAPICH"),
    ],
)
def test_local_ranks_of_launchers_on_several_hosts(env: dict[str, str], launcher: str) -> None:
    job = job_of(**env, ZCOMM_INIT_METHOD="file:///nowhere")
    assert (job.rank, job.world_size, job.local_rank, job.launcher) == (5, 8, 1, launcher)


@pytest.mark.parametrize("timeout", [float("inf"), float("nan"), 0, -1.0, 1e300, "60", True])
def test_a_timeout_that_cannot_be_right_is_named(timeout: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"init: timeout={timeout!r}: expected seconds")):
        zcomm.init(timeout=timeout)


@pytest.mark.parametrize("method", ["tcp://h:99999", "tcp://h:0", "tcp://h:", "tcp://h", "tcp://:1", "http://h:1"])
def test_a_meeting_point_that_cannot_be_right_is_named(method: str) -> None:
    with pytest.raises(ValueError, match=f"init_method='{method}'"):
        zcomm.init(timeout=1, rank=0, world_size=2, init_method=method)


@pytest.mark.parametrize(("rank", "world_size"), [("0", 2), (0, "2"), (0.0, 2), (True, 2)])
def test_a_rank_that_is_no_number_is_named(rank: Any, world_size: Any) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        zcomm.init(rank=rank, world_size=world_size, init_method="file:///nowhere")


def test_zcomm_is_a_name_of_its_own_choice() -> None:
    """torch.distributed and DeepSpeed's get_accelerator().communication_backend_name() use this name."""
    assert zcomm.init("zcomm").backend == "shm"
    zcomm.shutdown()


# ---- logs ----
def what_is_said() -> tuple[str, list[str]]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("zcomm").addHandler(handler)
    logging.getLogger("zcomm").setLevel(logging.INFO)
    comm = zcomm.init()
    comm.split(0)
    assert zcomm.init() is comm
    assert comm.backend == "shm" and (comm.local_rank, comm.local_world_size) == (comm.rank, 2)
    return comm.describe(), told


def test_the_choice_is_said_once(run_ranks: Run) -> None:
    (first, told), (second, untold) = run_ranks(what_is_said, 2)
    assert first == "rank 0 of 2 ranks on 1 host, backend shm" and second.startswith("rank 1 of 2")
    assert told == [f"INFO {first}"] and untold == []


# ---- causes that keep a rank from joining ----
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join_alone(rank: int, init_method: str, backend: str) -> None:
    zcomm.init(backend, timeout=1.5, rank=rank, world_size=3, init_method=init_method)


def join_alone_or_not(init_method: str) -> None:
    join_alone(int(os.environ["RANK"]), init_method, "auto")


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_come_are_named(rank: int, run_ranks: Run) -> None:
    """Rank 0 serves the store, so a job without rank 0 has no store."""
    (result,) = run_ranks(join_alone, 1, rank, f"tcp://127.0.0.1:{free_port()}", "auto", check=False)
    assert result.error is not None and "TimeoutError" in result.error.kinds, result.describe()
    assert ("rank(s) 1, 2 of 3" if rank == 0 else "rank 0 does not answer at tcp://127.0.0.1") in result.error.message
    if rank == 1:
        assert "is it running, is MASTER_ADDR its host, is the port open?" in result.error.message


def test_an_init_that_fails_leaves_no_meeting_file(run_ranks: Run, tmp_path: Path) -> None:
    for world in (1, 2):  # of 3 ranks
        for result in run_ranks(join_alone_or_not, world, f"file://{tmp_path}/meeting", check=False):
            assert result.error is not None and "TimeoutError" in result.error.kinds, result.describe()
        assert list(tmp_path.iterdir()) == []


def test_a_listener_that_is_no_store_and_says_nothing(run_ranks: Run) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        (result,) = run_ranks(join_alone, 1, 1, where, "auto", check=False)
    assert result.error is not None and "TimeoutError" in result.error.kinds, result.describe()
    assert f"rank 0 does not answer at {where}" in result.error.message


def cannot_open_a_door(lame: int, init_method: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == lame:
        os.environ["ZCOMM_SOCKET_IFNAME"] = "no-such-card"
    zcomm.init("tcp", timeout=60, rank=rank, world_size=2, init_method=init_method)


@pytest.mark.parametrize("lame", [0, 1])
def test_a_rank_that_cannot_listen_tells_the_others(lame: int, run_ranks: Run) -> None:
    results = run_ranks(cannot_open_a_door, 2, lame, f"tcp://127.0.0.1:{free_port()}", check=False, timeout_s=40)
    for rank, result in enumerate(results):
        assert result.error is not None, result.describe()
        assert result.error.kind == ("ValueError" if rank == lame else "RuntimeError"), result.describe()
        assert "ZCOMM_SOCKET_IFNAME=no-such-card" in result.error.message
        assert rank == lame or f"rank {lame} cannot take part: ValueError" in result.error.message


def joins_while_rank_0_dies(init_method: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 2.0)  # kills it while all wait for rank 2
    zcomm.init(timeout=60, rank=rank, world_size=3, init_method=init_method)


def test_death_of_the_rank_with_the_store_is_noticed(run_ranks: Run) -> None:
    first, second = run_ranks(joins_while_rank_0_dies, 2, f"tcp://127.0.0.1:{free_port()}", check=False, timeout_s=40)
    assert first.exitcode == -signal.SIGALRM
    assert second.error is not None and second.error.kind == "PeerLost" and second.error.rank == 0, second.describe()


def few_descriptors(spare: int, backend: str) -> str:
    if os.environ["RANK"] == "1":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + spare, hard))
    try:
        zcomm.init(backend, timeout=3.0)
    except OSError as error:
        return f"{type(error).__name__} {error.errno}: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "joined"


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("spare", [-1, 1, 4, 8, 12, 18])
def test_too_few_descriptors_name_the_limit(spare: int, backend: str, run_ranks: Run) -> None:
    others, short = run_ranks(few_descriptors, 2, spare, backend, timeout_s=40)
    assert short.startswith("OSError 24: ") and "ulimit -n" in short, short
    assert "rank 1" in others or "rank(s) 1" in others, others


# ---- fork ----
def fork_after_init(backend: str) -> tuple[int, str]:
    comm = zcomm.init(backend, timeout=20)
    part = comm.duplicate()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        told = []
        for call in (comm.barrier, lambda: part.all_reduce(torch.ones(3)), lambda: comm.split(0)):
            try:
                call()
                told.append("nothing")
            except RuntimeError as error:
                told.append(str(error))
        comm.close()
        zcomm.shutdown()
        os.write(writer, "\n".join(told).encode())
        os._exit(7)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(3)
    comm.all_reduce(tensor)
    part.all_reduce(tensor)
    assert tensor.tolist() == [4.0] * 3, "the parents go on"
    return os.waitstatus_to_exitcode(status), told


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(backend: str, run_ranks: Run) -> None:
    for code, told in run_ranks(fork_after_init, 2, backend):
        assert code == 7
        lines = told.splitlines()
        assert len(lines) == 3 and all("fork" in line for line in lines), told


# ---- Ctrl-C ----
def interruptible(folder: str, where: str, victim: int) -> tuple[str, float]:
    """Ranks 0 and 2 wait in the given call (only the victim for the store); return how the wait ended, and when."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    rank = int(os.environ["RANK"])
    if where == "operation":
        comm = zcomm.init(timeout=60)
        comm.barrier()
    Path(folder, f"ready{rank}").touch()
    try:
        if where == "operation":
            zcomm.all_reduce(torch.ones(3)) if rank != 1 else wait_for(Path(folder, "done"))
        elif where == "store" and rank != victim:
            wait_for(Path(folder, "done"))
        elif where == "store":
            zcomm.init(timeout=60, rank=rank, world_size=3, init_method=f"tcp://127.0.0.1:{os.environ['PORT']}")
        else:
            backend = "tcp" if where == "tcp" else "shm"
            if rank == 1:
                stop_before_connecting(folder)
            zcomm.init(backend, timeout=60)
    except KeyboardInterrupt:
        return "KeyboardInterrupt", time.monotonic()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "nothing", time.monotonic()


def stop_before_connecting(folder: str) -> None:
    """Make this rank publish its address and not connect."""
    from zcomm.bootstrap import rendezvous

    def stay_away(*_: object) -> None:
        wait_for(Path(folder, "done"))
        sys.exit(0)

    rendezvous.enter = stay_away  # type: ignore[assignment]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.parametrize("where", ["operation", "store", "shm", "tcp"])
@pytest.mark.parametrize("victim", [0, 2])
def test_ctrl_c_ends_the_wait_at_once(where: str, victim: int, start_ranks_in: Any, tmp_path: Path) -> None:
    """The victim waits: for rank 1 in an operation, for the store, or for rank 1's connection."""
    world = start_ranks_in(interruptible, 3, str(tmp_path), where, victim, env={"PORT": str(free_port())})
    for rank in range(3):
        wait_for(tmp_path / f"ready{rank}")
    time.sleep(1.0)  # the victim waits by now
    sent = world.kill(victim, signal.SIGINT)
    time.sleep(0.5)
    (tmp_path / "done").touch()
    results = world.join(60)
    assert results[victim].value is not None, results[victim].describe()
    what, ended = results[victim].value
    assert what == "KeyboardInterrupt" and ended - sent < 15.0, what
    other = 2 - victim
    if where != "store":
        assert results[other].value is not None, results[other].describe()
        text = results[other].value[0]
        lost = text.startswith(f"PeerLost: rank {victim} ")
        assert lost, text


def test_a_lost_rank_of_this_process_is_not_waited_for_at_exit(tmp_path: Path) -> None:
    """Ranks may be threads of one process, which would wait for its own end."""

    def lose(joined: Joined) -> None:
        comm = zcomm.Communicator(joined)
        with contextlib.closing(comm):
            comm.barrier()
            if comm.rank == 1:
                with pytest.raises(zcomm.PeerLost):
                    comm.barrier()

    thread_world(2, tmp_path, lose)
    assert Process.own() not in departure._causes
