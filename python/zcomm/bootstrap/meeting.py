"""Meeting: the ranks of a job meet in a store, check that they are one job, and exchange texts.

[Note: one job] A store may hold keys of another job. That job uses the same port or file, or has died and left its
file. So each rank claims its key by compare_set, and identifies itself: process, world size, and the name of its job
if the launcher set one.
- If another living process holds the claim, the rank came twice. A claim of a process that is known to be dead (same
  kernel and process namespace) is ignored and overwritten.
- Claims that differ in world size or name are not one job.
Either is an error on every rank in the meeting: the rank that detects it writes the failure to the store.
If no name distinguishes jobs, rank 0 watches for a while (``watch``). A rank that claims a place also sets a key, and
rank 0 then checks the claims. So it also detects a rank that arrives after the keys of the meeting were deleted.
Rank 0's claim has a fresh number, and later texts are read only if they carry it.
Thread rule: one meeting per rank at a time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zcomm import _core
from zcomm.bootstrap import deadlines
from zcomm.machine.process import Process

_log = logging.getLogger("zcomm")
_LAST_WORDS_S = 2.0
_LOOK_S = 0.05
_LINGER_SHARE = 0.1  # of the remaining time of joining, at most
_NEWCOMER = "newcomer"  # key: a rank has claimed a place
_ADVICE = (
    "Two jobs have one meeting point, or a rank was started twice: give each job a MASTER_PORT (or file) of its own"
)


class Meeting:
    """One rank's part in the meeting of a job's two or more ranks."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        deadline: float,
        place: str,
        patience_s: float,
        job: str = "",
        lost: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Set up this rank's part; nothing is exchanged yet.

        deadline: by time.monotonic(). place, patience_s: for errors. job: its name, or "".

        lost: returns an ended rank's number in the job, or None; for ranks that are already connected.
        """
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._deadline = deadline
        self._place = place
        self._patience_s = patience_s
        self._job = job
        self._lost = lost
        self._number = ""
        self._members: list[Process] = []

    def arrive(self, mine: dict[str, Any], linger_s: float = 0.0) -> list[dict[str, Any]]:
        """Claim this rank's place; return ``mine`` of every rank, by rank.

        linger_s: how long to look for duplicate ranks after all have arrived; less if joining has little time.
        Raises: RuntimeError naming the rank and both processes; TimeoutError naming the missing ranks, PeerLost.
        """
        own = {"process": asdict(Process.own()), "world_size": self._world_size, "job": self._job, "mine": mine}
        if self._rank == 0:
            own["number"] = secrets.token_hex(16)
        with self._store_named():
            self._claim(json.dumps(own))
            self._store.set(_NEWCOMER, "1")
            claims = [json.loads(told) for told in self._gather(_place_of, _is_alive)]
            self._require_one_job(claims)
            self._members = [_process_of(claim) for claim in claims]
            self._number = str(claims[0].get("number"))
            now = time.monotonic()
            until = now + min(linger_s, _LINGER_SHARE * max(0.0, self._deadline - now))
            if linger_s > 0:
                _wait(lambda: self._check_failure() or time.monotonic() > until, self._deadline)
            self._check_failure()
            return [each["mine"] for each in claims]

    def exchange(self, what: str, mine: str) -> list[str]:
        """Return the text of each rank, by rank. Raises: as arrive."""
        with self._store_named():
            self._store.set(f"{what}{self._rank}", f"{self._number} {mine}")
            told = self._gather(lambda rank: f"{what}{rank}", lambda text: text.startswith(f"{self._number} "))
            self._check_failure()
            return [text.partition(" ")[2] for text in told]

    def end(self) -> None:
        """Count this rank as done with the store; rank 0, which may serve the store, waits for the other ranks."""
        with contextlib.suppress(dist.DistError):
            self._store.add("read", 1)
            if self._rank == 0:
                until = min(self._deadline, time.monotonic() + _LAST_WORDS_S)
                _wait(lambda: self._store.add("read", 0) >= self._world_size, until)

    @property
    def members(self) -> tuple[Process, ...]:
        """Processes that have arrived, by rank."""
        return tuple(self._members)

    def watch(self, seconds: float, give_up: Callable[[], object]) -> Watch:
        """Poll for a failure for ``seconds``, on a new thread, and call ``give_up`` if there is one.

        For jobs without a name: ranks of two jobs may have met before the remaining ranks of either arrive.
        """
        store, file = self._store, _file_of(self._store)

        def look() -> bool:
            if file is not None and not file.exists():  # torch would wait for it
                return False
            self._look_for_newcomers()
            if not store.check(["failure"]):
                return True
            failure = store.get("failure").decode()
            store.add("acknowledged", 1)
            _log.error("rank %d leaves the job: %s", self._rank, failure)
            give_up()
            return False

        return Watch(look, seconds)

    def _look_for_newcomers(self) -> None:
        """Write a failure if another process has claimed the place of a joined rank."""
        if not self._store.check([_NEWCOMER]):
            return
        self._store.delete_key(_NEWCOMER)
        for rank, member in enumerate(self._members):
            if (other := self.holder(rank)) is not None and other != member:
                self._store.set("failure", self._twice(rank, member, other))

    def holder(self, rank: int) -> Process | None:
        """Return the living process, other than this one, that holds the claim of ``rank``, or None."""
        if not self._store.check([_place_of(rank)]):
            return None
        process = _process_of(json.loads(self._store.get(_place_of(rank))))
        return None if process == Process.own() or process.is_dead() else process

    def refuse_twin(self, other: Process) -> None:
        """Write the failure that ``other`` and this process are the same rank. Raises: RuntimeError."""
        self._refuse(self._twice(self._rank, other, Process.own()))

    def _twice(self, rank: int, first: Process, second: Process) -> str:
        return f"rank {rank} of {self._world_size} came twice to {self._place}: {first}, and {second}. {_ADVICE}"

    # --- claims -----------------------------------------------------------------------------------------------

    def _claim(self, text: str) -> None:
        name, before = _place_of(self._rank), ""
        while (there := self._store.compare_set(name, before, text).decode()) != text:
            process = _process_of(json.loads(there))
            if process != Process.own() and not process.is_dead():
                self.refuse_twin(process)
            if there == before:  # deleted meanwhile
                self._store.set(name, text)
                break
            before = there  # of a dead process, or of an earlier attempt of this one

    def _require_one_job(self, claims: list[dict[str, Any]]) -> None:
        for word, told in (("world_size", "WORLD_SIZE"), ("job", "the name of the job")):
            named = [(rank, each[word]) for rank, each in enumerate(claims) if each[word]]
            for rank, value in named[1:]:
                first, wanted = named[0]
                if value != wanted:
                    self._refuse(
                        f"ranks of different jobs came to {self._place}: {told} is {wanted} for rank {first} "
                        f"({_process_of(claims[first])}), and {value} for rank {rank} "
                        f"({_process_of(claims[rank])}). {_ADVICE}"
                    )

    def _refuse(self, failure: str) -> None:
        self._store.set("failure", failure)
        self._check_failure()

    def _check_failure(self) -> bool:
        """Return False. Raises: RuntimeError with the failure, if there is one."""
        store = self._store
        if not store.check(["failure"]):
            return False
        failure = store.get("failure").decode()
        store.add("acknowledged", 1)
        if self._rank == 0:  # it may serve the store: wait until all, and the extra process, have read the failure
            until = time.monotonic() + _LAST_WORDS_S
            while store.add("acknowledged", 0) <= self._world_size and time.monotonic() < until:
                time.sleep(0.02)
        raise RuntimeError(f"init: {failure}")

    # --- waiting ----------------------------------------------------------------------------------------------

    def _gather(self, name_of: Callable[[int], str], counts: Callable[[str], bool]) -> list[str]:
        """Return the text of each rank, once all texts exist and satisfy ``counts``."""
        store, names = self._store, [name_of(rank) for rank in range(self._world_size)]
        texts: list[str] = []
        began, looked, has_warned = time.monotonic(), False, False

        def missing() -> list[int]:
            there = [store.check([name]) and counts(store.get(name).decode()) for name in names]
            return [rank for rank, here in enumerate(there) if not here]

        def report() -> None:
            """Log the late ranks once: the lowest waiting rank logs for all."""
            nonlocal looked, has_warned
            waited = time.monotonic() - began
            if looked or waited < deadlines.WARN_S:
                return
            looked, late = True, missing()
            self._require_own(late)
            has_warned = bool(late) and self._rank == min(set(range(self._world_size)) - set(late))
            if has_warned:
                _log.warning("init: %s after %.3g s", self._not_come(late), waited)

        def all_here() -> bool:
            nonlocal texts
            if not store.check(names):
                self._look_for_lost()
                report()
                return self._check_failure()
            texts = [told.decode() for told in store.multi_get(names)]
            return all(counts(text) for text in texts) or self._check_failure()

        if not _wait(all_here, self._deadline):
            late = missing()
            self._require_own(late)
            raise TimeoutError(f"init: {self._not_come(late)} within {self._patience_s:g} s")
        if has_warned:
            _log.warning("init: all ranks have come after %.3g s", time.monotonic() - began)
        return texts

    def _require_own(self, late: list[int]) -> None:
        """Raise RuntimeError if this rank is among ``late``, because it has written its key before."""
        if self._rank in late:
            raise RuntimeError(
                f"init: {self._place} has lost the key that rank {self._rank} wrote: an earlier group has removed it "
                "(torch removes a group's file when the group ends); give each group a file or store of its own"
            )

    def _not_come(self, ranks: list[int]) -> str:
        listed = ", ".join(map(str, ranks))
        return f"rank(s) {listed} of {self._world_size} did not come to {self._place}"

    def _look_for_lost(self) -> None:
        if (rank := self._lost()) is not None:
            lost = _core.PeerLost(f"init: rank {rank} of the job ended before all ranks had come to {self._place}")
            lost.rank = lost.group_rank = rank
            raise lost

    @contextlib.contextmanager
    def _store_named(self) -> Any:
        try:
            yield
        except dist.DistError as error:
            lost = _core.PeerLost(
                f"init: rank {self._rank} lost the store, which rank 0 has: rank 0 has ended, or has destroyed an "
                f"earlier group late (destroy it on all ranks before any of them makes the next one). {error}"
            )
            lost.rank = lost.group_rank = 0
            raise lost from error


class Watch:
    """Thread that polls a store until a time is over, ``look`` returns False, or ``end()``.

    Only this thread holds the store. ``end()`` waits for the thread, so that a store served here can then close.
    """

    def __init__(self, look: Callable[[], bool], seconds: float) -> None:
        """Call ``look`` repeatedly while it returns True."""
        self._pid = os.getpid()
        self._is_over = is_over = threading.Event()
        until = time.monotonic() + seconds

        def run() -> None:
            with contextlib.suppress(dist.DistError):  # the store has closed
                while time.monotonic() < until and threading.main_thread().is_alive() and look():
                    if is_over.wait(_LOOK_S):
                        return

        # Not a daemon: Python ends threads within torch's calls by force, and C++ then ends the process.
        self._thread = threading.Thread(target=run, name="zcomm-meeting")
        self._thread.start()

    def end(self) -> None:
        """End the thread, and wait for it (not on the thread itself). Idempotent; nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._is_over.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _file_of(store: Any) -> Path | None:
    """Return the file of a FileStore, otherwise None."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    path = getattr(store, "path", None)  # torch's stubs lack it
    return Path(path) if isinstance(store, dist.FileStore) and path else None


def _place_of(rank: int) -> str:
    return f"rank{rank}"


def _process_of(claim: dict[str, Any]) -> Process:
    return Process(**claim["process"])


def _is_alive(claim: str) -> bool:
    return not _process_of(json.loads(claim)).is_dead()


def meeting_keys(world_size: int) -> list[str]:
    """List the keys in the store after a meeting that exchanged addresses."""
    return [f"{what}{rank}" for what in ("rank", "address") for rank in range(world_size)] + ["read", _NEWCOMER]


def _wait(happened: Callable[[], bool], deadline: float) -> bool:
    """Poll ``happened`` with growing pauses; return False at the deadline."""
    pause = 0.001
    while not happened():
        _core.check_stop()
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True
