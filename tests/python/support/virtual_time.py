"""Virtual time: each thread and stream of a program that really runs has a clock of its own.

A clock moves on by work (an amount over a rate), and by waits for points of other clocks. Work begins once its actor
has come to it and its resource is free. A thread runs only while no other clock is behind its own. So decisions that
ask ``done()`` see virtual time, and the load of the machine changes nothing.

Actors are the threads of Python that work here, and queues of acts for others: streams, communicators, operations of a
drive. Resources: "compute", "down" and "up" (the bus of a device), "host" (its memory bus), "read" and "write" (a
drive). Each does one thing at a time, first come first served. Bytes of the bus and of the drive also take their time
of the host's memory bus, at once.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

_MOVES = ("down", "up", "read", "write")  # resources with bytes that cross the host's memory bus, too


@dataclass(frozen=True)
class Rates:
    """Amounts per second. compute: parameters that a forward computes with. bus, drive: bytes in one direction. host:
    bytes of the memory bus."""

    compute: float
    bus: float
    host: float
    drive: float

    def seconds(self, resource: str, amount: float) -> float:
        name = {"down": "bus", "up": "bus", "read": "drive", "write": "drive"}.get(resource, resource)
        return amount / float(getattr(self, name))


class Use(NamedTuple):
    """Work on a resource: bytes, or parameters of a forward."""

    resource: str
    amount: float


class Wait(NamedTuple):
    point: int


class Reach(NamedTuple):
    point: int


class Piece(NamedTuple):
    """Work that was done, and its time. Seconds since the beginning."""

    actor: str
    resource: str
    amount: float
    begin: float
    end: float


@dataclass
class _Actor:
    """A queue of acts, each with the time from which it may be done."""

    clock: float = 0.0
    todo: deque[tuple[float, Use | Wait | Reach]] = field(default_factory=deque)

    def next_use(self, reached: dict[int, float]) -> Use | None:
        """Do the acts that take no time. Returns: the use that follows; None: it waits, or has nothing to do."""
        while self.todo:
            earliest, act = self.todo[0]
            self.clock = max(self.clock, earliest)
            if isinstance(act, Use):
                return act
            if isinstance(act, Reach):
                reached[act.point] = self.clock
            elif act.point not in reached:
                return None
            else:
                self.clock = max(self.clock, reached[act.point])
            self.todo.popleft()
        return None


@dataclass
class _Thread:
    """A thread. point: that it waits for; 0: none. calls: of an idle Worker, the times from which they may begin."""

    clock: float = 0.0
    runs: bool = False
    point: int = 0
    is_idle: bool = False
    calls: deque[float] = field(default_factory=deque)

    def turn(self, reached: dict[int, float]) -> float | None:
        """Return the time from which it can run; None: it cannot."""
        if self.is_idle:
            return max(self.clock, self.calls[0]) if self.calls else None
        if self.point and self.point not in reached:
            return None
        return max(self.clock, reached.get(self.point, 0.0))


class VirtualTime:
    """The clocks of all actors. pieces: all work so far, in the order of its begin on each resource."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.pieces: list[Piece] = []
        self._actors: dict[str, _Actor] = defaultdict(_Actor)
        self._threads = {threading.current_thread().name: _Thread(runs=True)}
        self._turn = threading.Condition()
        self._numbers = count(1)
        self._points: dict[int, tuple[object, int]] = {}  # by id() of an event, work or moment: its last point
        self._reached: dict[int, float] = {}
        self._free: dict[str, float] = defaultdict(float)  # by resource
        self._is_over = False

    def stop(self) -> None:
        """Let all threads run as they like: to ``close``, say."""
        with self._turn:
            self._is_over = True
            self._turn.notify_all()

    def amounts(self, begin: float, end: float) -> dict[str, float]:
        """Return the amounts by resource of the work that began between two times."""
        found: dict[str, float] = defaultdict(float)
        for piece in self.pieces:
            if begin <= piece.begin < end:
                found[piece.resource] += piece.amount
        return found

    # --- the calling thread -----------------------------------------------------------------------------------

    @property
    def _here(self) -> _Thread | None:
        return None if self._is_over else self._threads.get(threading.current_thread().name)

    def ask(self, actor: str, *acts: Use | Wait | Reach) -> None:
        """Queue acts for another actor; "": for one of their own."""
        with self._turn:
            if (here := self._here) is not None:
                actor = actor or f"operation {next(self._numbers):06}"
                self._actors[actor].todo.extend((here.clock, act) for act in acts)

    def use(self, resource: str, amount: float) -> None:
        with self._turn:
            if (here := self._here) is not None:
                here.clock = self._work(threading.current_thread().name, here.clock, Use(resource, amount))
                self._pass_on(here)

    def wait(self, owner: Any) -> None:
        """Wait for the owner's last point, if it has one."""
        with self._turn:
            if (here := self._here) is not None:
                for wait in self.waits(owner):
                    here.point = wait.point
                    self._pass_on(here)

    def expect(self, owner: Any) -> None:
        """Let waits for the owner wait for its only point, of a later ``reach``."""
        with self._turn:
            if self._here is not None and not self.waits(owner):
                self.new_point(owner)

    def reach(self, owner: Any) -> None:
        self.expect(owner)
        with self._turn:
            if (here := self._here) is not None:
                self._reached[self.waits(owner)[0].point] = here.clock

    def has_passed(self, owner: Any) -> bool | None:
        """Return True if this thread's clock is not before the owner's last point; None: it has none."""
        with self._turn:
            here, waits = self._here, self.waits(owner)
            if here is None or not waits:
                return None
            return self._reached.get(waits[0].point, float("inf")) <= here.clock

    def mark(self, owner: Any) -> int:
        """Return the point at which torch's stream will have done its work so far."""
        self.ask("compute", point := self.new_point(owner))
        return point.point

    def time_of(self, point: int) -> float:
        """Return the time of a point of ``mark``."""
        return self._reached[point]

    def wait_end(self) -> None:
        """Wait until torch's stream has done its work."""
        self.mark(self)
        self.wait(self)

    def new_point(self, owner: Any) -> Reach:
        """Return the act that reaches a new point of ``owner``, for which later calls of ``waits`` wait."""
        point = next(self._numbers)
        self._points[id(owner)] = owner, point  # kept, so that no other object has its id
        return Reach(point)

    def waits(self, owner: Any) -> list[Wait]:
        """Return the act that waits for the owner's last point, if it has one."""
        known = self._points.get(id(owner))
        return [] if known is None else [Wait(known[1])]

    # --- calls of Workers -------------------------------------------------------------------------------------

    def submit(self, name: str) -> None:
        """Note a call for the thread ``name``."""
        with self._turn:
            if (here := self._here) is not None:
                self._threads.setdefault(name, _Thread(is_idle=True)).calls.append(here.clock)

    def begin_call(self) -> None:
        with self._turn:
            if (here := self._here) is not None:
                self._await_turn(here)

    def end_call(self) -> None:
        with self._turn:
            if (here := self._here) is not None:
                here.runs, here.is_idle = False, True
                self._dispatch()

    # --- turns: with the lock ---------------------------------------------------------------------------------

    def _pass_on(self, here: _Thread) -> None:
        """Let threads and actors with an earlier clock go on first; at least until ``here.point`` is reached."""
        here.runs = False
        self._dispatch()
        self._await_turn(here)

    def _await_turn(self, here: _Thread) -> None:
        while not here.runs and not self._is_over:
            self._turn.wait()

    def _dispatch(self) -> None:
        """Do the work of actors up to the clock of the first thread that can run, and let that thread run."""
        while True:
            before = len(self._reached)
            uses = {name: use for name, each in self._actors.items() if (use := each.next_use(self._reached))}
            for name in [n for n, each in self._actors.items() if n.startswith("operation") and not each.todo]:
                del self._actors[name]
            if len(self._reached) > before:
                continue  # other actors may wait for these points
            starts = [(max(self._actors[n].clock, self._free[u.resource]), n) for n, u in uses.items()]
            turns = [(at, name) for name, each in self._threads.items() if (at := each.turn(self._reached)) is not None]
            if not starts and not turns:
                self._is_over = True
                self._turn.notify_all()
                raise AssertionError(f"all wait for ever: {self._threads}")
            if not starts or (turns and min(turns)[0] <= min(starts)[0]):
                self._run(*min(turns))
                return
            name = min(starts)[1]
            actor = self._actors[name]
            actor.clock = self._work(name, actor.clock, uses[name])
            actor.todo.popleft()

    def _run(self, at: float, name: str) -> None:
        thread = self._threads[name]
        if thread.is_idle:
            thread.calls.popleft()
        thread.clock, thread.runs, thread.is_idle, thread.point = at, True, False, 0
        self._turn.notify_all()

    def _work(self, actor: str, clock: float, use: Use) -> float:
        """Do work that may begin at ``clock``. Returns: its end."""
        begin = max(clock, self._free[use.resource])
        end = self._free[use.resource] = begin + self.rates.seconds(use.resource, use.amount)
        if use.resource in _MOVES:
            self._free["host"] = max(self._free["host"], begin) + self.rates.seconds("host", use.amount)
        self.pieces.append(Piece(actor, use.resource, use.amount, begin, end))
        return end
