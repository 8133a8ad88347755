"""Joining over TCP, below the communicator, with threads as ranks: strangers, wrong tokens, missing members."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import zcomm
from zcomm.bootstrap.auth import ANSWER_NBYTES, CHALLENGE_NBYTES, CallerProof, Line, ListenerProof, Purpose, derive_key
from zcomm.bootstrap.deadlines import Deadlines
from zcomm.bootstrap.hosts import Hosts
from zcomm.bootstrap.join import Group, Settings, plan_lines
from zcomm.bootstrap.tcp import TcpListener, connect_lines

KEY = derive_key(b"secret", b"test")
Sockets = dict[Line, socket.socket]


def group(rank: int, hosts: list[str], requested: str = "auto") -> Group:
    return Group(
        "test",
        rank,
        Hosts.of(hosts, ["m"] * len(hosts)),
        requested,
        KEY,
        Deadlines.exactly(10.0),
        Settings(ring_sockets=3),
    )


@contextlib.contextmanager
def listeners(count: int, address: str = "127.0.0.1") -> Iterator[list[TcpListener]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(TcpListener(address))) for _ in range(count)]


class Ranks:
    """Threads that join a world on ``doors``; finish() closes their connections."""

    def __init__(self, doors: list[TcpListener], hosts: list[str] | None = None, requested: str = "auto") -> None:
        self.doors = doors
        self.hosts = hosts or [f"h{rank}" for rank in range(len(doors))]
        self.requested = requested
        self.pool = ThreadPoolExecutor(len(doors))

    def join(self, rank: int, timeout_s: float = 10.0, key: bytes = KEY) -> Future[Sockets]:
        lines = plan_lines(group(rank, self.hosts, self.requested))
        endpoints = [door.endpoint for door in self.doors]
        return self.pool.submit(connect_lines, rank, endpoints, lines, self.doors[rank], key, timeout_s)

    def finish(self, *futures: Future[Sockets]) -> None:
        for future in futures:
            if future.exception() is None:
                for one in future.result().values():
                    one.close()
        self.pool.shutdown()


def check_lines(results: list[Sockets]) -> None:
    """Check that each line's two sockets are the two ends of one connection."""
    for rank, sockets in enumerate(results):
        for line, one in sockets.items():
            one.setblocking(True)
            one.sendall(repr((rank, line)).encode())
    for rank, sockets in enumerate(results):
        for line, one in sockets.items():
            peer = line.caller if line.listener == rank else line.listener
            assert one.recv(4096).decode() == repr((peer, line))


@pytest.mark.parametrize(
    ("hosts", "requested"),
    [("ab", "auto"), ("abc", "auto"), ("aab", "auto"), ("aabb", "auto"), ("abab", "auto"), ("aaa", "tcp")],
)
def test_each_line_joins_its_two_ranks(hosts: str, requested: str) -> None:
    with listeners(len(hosts)) as doors:
        ranks = Ranks(doors, list(hosts), requested)
        futures = [ranks.join(rank) for rank in range(len(hosts))]
        try:
            check_lines([future.result() for future in futures])
        finally:
            ranks.finish(*futures)


def test_ipv6() -> None:
    try:
        probe = TcpListener("::1")
    except OSError as error:
        pytest.skip(f"no IPv6 loopback here: {error}")
    probe.close()
    with listeners(2, "::1") as doors:
        ranks = Ranks(doors)
        futures = [ranks.join(0), ranks.join(1)]
        check_lines([future.result() for future in futures])
        ranks.finish(*futures)


def test_lines_are_the_same_on_both_ends_and_enough() -> None:
    for hosts in ["ab", "aab", "aabb", "abab", "aabbcc", "abcabcabc", "abcdefgh"]:
        world = len(hosts)
        plans = [plan_lines(group(rank, list(hosts))) for rank in range(world)]
        where = group(0, list(hosts)).hosts
        for a in range(world):
            for b in range(a + 1, world):
                ours = sorted(line for line in plans[a] if b in (line.caller, line.listener))
                assert ours == sorted(line for line in plans[b] if a in (line.caller, line.listener))
                links = sum(line.purpose == Purpose.LINK for line in ours)
                assert {(line.purpose, line.number) for line in ours} >= {(Purpose.DATA, 0), (Purpose.CONTROL, 0)}
                if group(0, list(hosts)).backend == "tcp":
                    assert links == (5 if (b - a) % world in (1, world - 1) else 2)
                else:
                    assert (links >= 2) == (where.local_rank(a) == where.local_rank(b)) and links >= 1


# ---- strangers ----
def stranger(endpoint: tuple[str, int], behave: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError), socket.create_connection(endpoint, 5) as connected:
        connected.settimeout(5)
        behave(connected)


def test_strangers_with_random_bytes_do_not_stop_a_join() -> None:
    """Strangers send random bytes (seeded) of random length in random pieces; each is dropped or leaves."""
    dice = random.Random(20)
    lengths = [0, 1, 7, 8, CHALLENGE_NBYTES, ANSWER_NBYTES - 1, ANSWER_NBYTES, 500, 70_000]

    def babble(connected: socket.socket) -> None:
        for _ in range(dice.randint(1, 5)):
            connected.sendall(dice.randbytes(dice.choice(lengths)))
            if dice.random() < 0.5:
                time.sleep(0.001)

    with listeners(2) as doors:
        ranks = Ranks(doors)
        first = ranks.join(0)
        for _ in range(200):
            stranger(doors[0].endpoint, babble)
        assert not first.done(), first.exception()
        second = ranks.join(1)
        check_lines([first.result(), second.result()])
        ranks.finish(first, second)


def test_silent_and_half_open_strangers_leave_room_for_members() -> None:
    """More strangers than a listener keeps: some have closed their side, some stay silent or send half a message."""
    with listeners(2) as doors, contextlib.ExitStack() as stack:
        ranks = Ranks(doors)
        first = ranks.join(0)
        oldest = stack.enter_context(socket.create_connection(doors[0].endpoint, 5))
        for number in range(300):
            connected = stack.enter_context(socket.create_connection(doors[0].endpoint, 5))
            if number % 3 == 0:
                connected.send(b"zcomm")
            elif number % 3 == 1:
                connected.shutdown(socket.SHUT_WR)
        assert not first.done(), first.exception()
        assert oldest.recv(CHALLENGE_NBYTES) and oldest.recv(1) == b"", "the oldest stranger was dropped"
        second = ranks.join(1)
        check_lines([first.result(), second.result()])
        ranks.finish(first, second)


def test_wrong_token_is_dropped_and_the_right_one_comes_in() -> None:
    with listeners(2) as doors:
        ranks = Ranks(doors)
        first = ranks.join(0)
        with pytest.raises(TimeoutError, match=r"rank\(s\) 0\b.*same job \(token"):
            ranks.join(1, timeout_s=0.5, key=derive_key(b"guess", b"test")).result()
        assert not first.done(), first.exception()
        second = ranks.join(1)
        check_lines([first.result(), second.result()])
        ranks.finish(first, second)


def test_caller_does_not_trust_whoever_listens() -> None:
    """A listener that does not know the token gets an answer, but no connection."""
    heard: list[bytes] = []

    def impostor(door: TcpListener) -> None:
        door.socket.setblocking(True)
        door.socket.settimeout(5)
        connected, _ = door.socket.accept()
        with connected:
            connected.sendall(ListenerProof(b"guess", 0, 2).challenge)
            heard.append(connected.recv(ANSWER_NBYTES, socket.MSG_WAITALL))
            connected.sendall(b"\0" * 32)
            assert connected.recv(100) == b""  # the connection ends here

    with listeners(2) as doors:
        ranks = Ranks(doors)
        thread = threading.Thread(target=impostor, args=(doors[0],))
        thread.start()
        with pytest.raises(TimeoutError, match="does not know the job's token"):
            ranks.join(1, timeout_s=0.5).result()
        thread.join()
        assert b"secret" not in heard[0] and KEY not in heard[0]
        ranks.finish()


def test_a_slow_member_is_not_a_stranger() -> None:
    """The listener reads an answer to its end, even byte by byte."""
    line = Line(1, 0, Purpose.DATA)
    with listeners(1) as (door,), ThreadPoolExecutor(1) as pool:
        endpoints = [door.endpoint, ("127.0.0.1", 1)]
        future = pool.submit(connect_lines, 0, endpoints, [line], door, KEY, 10.0)
        with socket.create_connection(door.endpoint, 5) as connected:
            proof = CallerProof(KEY, line, 2)
            answer = proof.answer(connected.recv(CHALLENGE_NBYTES, socket.MSG_WAITALL))
            assert answer is not None
            for byte in answer:
                connected.send(bytes([byte]))
                time.sleep(0.005)
            assert proof.accepts(connected.recv(32, socket.MSG_WAITALL))
            future.result()[line].close()


@pytest.mark.parametrize("field", ["world_size", "caller", "listener", "purpose", "number", "replay"])
def test_a_proof_for_something_else_counts_for_nothing(field: str) -> None:
    line, world_size = Line(1, 0, Purpose.LINK, 1), 2
    claims = {
        "caller": (Line(2, 0, Purpose.LINK, 1), 3),
        "listener": (Line(1, 1, Purpose.LINK, 1), 2),
        "purpose": (Line(1, 0, Purpose.DATA), 2),
        "number": (Line(1, 0, Purpose.LINK, 2), 2),
        "world_size": (line, 3),
        "replay": (line, 2),
    }
    listener = ListenerProof(KEY, 0, world_size)
    heard = ListenerProof(KEY, 0, world_size).challenge if field == "replay" else listener.challenge
    answer = CallerProof(KEY, *claims[field]).answer(heard)
    assert answer is not None
    judged = listener.judge(answer)
    assert judged is None or judged[0] != line


def test_any_changed_bit_of_an_answer_makes_a_stranger() -> None:
    listener = ListenerProof(KEY, 0, 2)
    answer = CallerProof(KEY, Line(1, 0, Purpose.DATA), 2).answer(listener.challenge)
    assert answer is not None and listener.judge(answer) is not None
    for place in range(len(answer) * 8):
        changed = bytearray(answer)
        changed[place // 8] ^= 1 << place % 8
        assert listener.judge(bytes(changed)) is None


# ---- members that are missing, or end ----
def test_missing_rank_is_named() -> None:
    with listeners(3) as doors:
        ranks = Ranks(doors)
        futures = [ranks.join(rank, timeout_s=1.0) for rank in (0, 2)]
        for future in futures:
            with pytest.raises(TimeoutError, match=r"rank\(s\) 1 within 1 s"):
                future.result()
        ranks.finish(*futures)


def test_a_rank_that_ends_is_lost_at_once() -> None:
    """Rank 0's listener is closed, so no process will ever answer at its address."""
    with listeners(2) as doors:
        doors[0].close()
        ranks = Ranks(doors)
        started = time.monotonic()
        with pytest.raises(zcomm.PeerLost, match="rank 0 ended") as caught:
            ranks.join(1, timeout_s=60).result()
        assert caught.value.rank == 0
        assert time.monotonic() - started < 30
        ranks.finish()


def test_a_member_that_ends_while_others_are_awaited() -> None:
    """Rank 1 has joined rank 0 and ends before rank 2 joins."""
    with listeners(3) as doors:
        ranks = Ranks(doors)
        first = ranks.join(0, timeout_s=60)
        with pytest.raises(TimeoutError):
            ranks.join(1, timeout_s=0.5).result()
        with pytest.raises(zcomm.PeerLost, match="rank 1 ended"):
            first.result()
        ranks.finish(first)


# ---- descriptors ----
def descriptors() -> int:
    """Return the number of open descriptors, including the one that counts."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_failed_join_keeps_no_descriptor() -> None:
    before = descriptors()
    with listeners(2) as doors:
        ranks = Ranks(doors)
        with pytest.raises(TimeoutError):
            ranks.join(0, timeout_s=0.2).result()
        with pytest.raises((TimeoutError, zcomm.PeerLost)):
            ranks.join(1, timeout_s=0.2).result()
        ranks.finish()
    assert descriptors() == before


STRANGERS = """
import socket, sys
guests = [socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) for _ in range(int(sys.argv[3]))]
print("connected", flush=True)
sys.stdin.read()
"""


def few_descriptors(spare: int, strangers: int) -> str:
    """Rank 0 of 2 joins with ``spare`` descriptors left, all taken by strangers; rank 1 is a thread next to it."""
    with listeners(2) as doors:
        ranks = Ranks(doors)
        command = [sys.executable, "-S", "-c", STRANGERS, *map(str, doors[0].endpoint), str(strangers)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdin is not None
            child.stdout.readline()
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            before = descriptors()
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + spare, hard))
            first = ranks.join(0, timeout_s=20)
            deadline = time.monotonic() + 10
            while strangers and descriptors() < before + spare - 3 and time.monotonic() < deadline:
                time.sleep(0.02)
            child.stdin.close()
        while descriptors() > before + 3 and time.monotonic() < deadline:  # rank 0 drops the strangers
            time.sleep(0.02)
        second = ranks.join(1, timeout_s=20)
        try:
            check_lines([first.result(), second.result()])
            return "joined"
        except OSError as error:
            return f"{error.errno} {error}"
        finally:
            ranks.finish(first, second)


def test_too_few_descriptors_name_the_limit(run_ranks: Callable[..., list[Any]]) -> None:
    (message,) = run_ranks(few_descriptors, 1, 10, 0)
    assert message.startswith("24 ") and "ulimit -n" in message, message


def test_strangers_that_take_all_descriptors_are_dropped(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(few_descriptors, 1, 45, 60) == ["joined"]
