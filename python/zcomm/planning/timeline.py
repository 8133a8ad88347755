"""Timeline of a step on a GPU as the model of its lanes has it ([Note: lanes] in lanes.py): each piece of work by lane.

The parameters are cut into equal pieces, as buckets and units are. Each lane does one piece of work at a time, in the
order in which training issues it. Work starts once its lane is free and its inputs are there. The seconds of each lane
add up to those of the step's lanes. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from zcomm.planning.lanes import LANES, GpuStep, Pass

PIECES = 32  # at most: more are too small to see
_SLOTS = 2  # pieces of weights on the GPU next to the one that is being gathered


class Work(NamedTuple):
    """A piece of work on a lane. Seconds since the step's begin."""

    lane: str
    name: str
    begin: float
    end: float


def timeline(step: GpuStep, pieces: int = PIECES) -> list[Work]:
    """Return the work of one step in the steady state. With updates in forward it begins with those of the last step.

    pieces: into which the parameters are cut. Raises: ValueError naming the lanes without a rate, and the remedy.
    """
    every = frozenset(range(pieces))
    chart = _Chart(step, pieces, frozenset() if step.update == "forward" else every)
    if step.update == "forward" and step.ready:
        trial = _Chart(step, pieces, every)
        trial.run()
        chart.early_pieces = every.difference(piece for piece, _ in trial.pending)
    chart.run()
    chart.settle(math.inf)
    return chart.work


class _Chart:
    """The work so far. free: the time from which each lane is free. pending: pieces to update, each with the time from
    which it may be. early_pieces: those that are updated in backward, or behind it.

    summed, read, updated: by piece, the time from which its sum is complete, its state read, its new weights usable.
    """

    def __init__(self, step: GpuStep, pieces: int, early: frozenset[int]) -> None:
        lanes, late = step.known()
        self.step, self.pieces, self.early_pieces = step, pieces, early
        self.compute_s = lanes["compute"] / step.accumulation / pieces
        self.late = {lane: seconds / pieces for lane, seconds in late.items()}
        self.early = {lane: (lanes[lane] - late[lane]) / pieces / step.accumulation for lane in late}
        gradients = (step.accumulation - 1) * step.earlier[1] + step.last[1]
        self.early["memory bus"] -= gradients / pieces / step.accumulation  # of gathers
        self.work: list[Work] = []
        self.free = dict.fromkeys(LANES, 0.0)
        self.pending: deque[tuple[int, float]] = deque()
        self.read: dict[int, float] = {}
        self.updated = [0.0] * pieces
        self.summed = [0.0] * pieces

    def put(self, lane: str, name: str, after: float, seconds: float) -> float:
        """Add work that begins at ``after`` or later. Returns: its end."""
        if seconds <= 0:
            return after
        begin = max(after, self.free[lane])
        self.free[lane] = begin + seconds
        self.work.append(Work(lane, name, begin, begin + seconds))
        return begin + seconds

    def run(self) -> None:
        """Add all work, without updates that can only begin later. Updates in ``step()`` or in backward may begin once
        only ``slots`` pieces lack their sum."""
        last, slots = self.step.accumulation - 1, math.ceil(self.step.ready * self.pieces)
        for number in range(self.step.accumulation):
            self.forward(updates=self.step.update == "forward" and number == 0)
            self.backward(*((slots, self.step.last) if number == last else (0, self.step.earlier)))
        if not slots and self.step.update != "forward":
            ready = max(*self.summed, self.free["compute"])  # the norm is known
            self.pending.extend((piece, ready) for piece in range(self.pieces)[::-1])
        self.settle(self.free["compute"])

    def forward(self, updates: bool) -> None:
        """Add a forward. updates: each piece is updated before it is used."""
        ends = [self.free["compute"]] * _SLOTS
        for piece in range(self.pieces):
            if updates and piece not in self.early_pieces:
                self.update(piece, ends[-_SLOTS] if self.early["up"] > 0 else 0.0, piece + 1)
            ends.append(self.compute("forward", piece, self.step.forward, ends[-_SLOTS]))

    def backward(self, slots: int, gradients: Pass) -> None:
        """Add a backward pass, with the last piece first. slots: see ``run``; 0: no update begins in it. gradients: its
        seconds for these."""
        down_s, bus_s = (seconds / self.pieces for seconds in gradients)
        ends = [self.free["compute"]] * _SLOTS
        first = min(slots, self.pieces - 1)  # its sum lets the updates begin
        for piece in range(self.pieces)[::-1]:
            ends.append(self.compute("backward", piece, 1 - self.step.forward, ends[-_SLOTS]))
            down = self.put("down", f"gradient {piece}", ends[-1], down_s)
            self.settle(down)
            done = self.summed[piece] = self.put("memory bus", f"sum {piece}", down, bus_s + self.early["memory bus"])
            if slots and piece <= first:
                summed = range(piece, self.pieces)[::-1] if piece == first else [piece]
                self.pending.extend((each, done) for each in summed if each in self.early_pieces)

    def compute(self, phase: str, piece: int, share: float, slot: float) -> float:
        """Add the computing of a piece, and its gather. slot: the time from which a slot is free. share: of a
        micro-step's computing. Returns: its end."""
        ready = self.put("drive", f"read {piece}", slot, self.early["drive"] / 2)
        ready = self.put("up", f"gather {piece}", max(ready, self.updated[piece]), self.early["up"] / 2)
        return self.put("compute", f"{phase} {piece}", max(ready, self.updated[piece]), share * self.compute_s)

    def settle(self, until: float) -> None:
        """Add the pending updates that begin before ``until``."""
        while self.pending:
            piece, ready = turn = self.turn()
            self.expect(piece, ready)
            if max(self.free["memory bus"], self.read[piece], ready) >= until:
                return
            self.pending.remove(turn)
            self.update(piece, ready, piece - 1)

    def turn(self) -> tuple[int, float]:
        """Return the pending piece that is updated next: in its order, or if the next forward updates the rest the one
        that this needs first."""
        if self.step.update != "forward":
            return self.pending[0]
        begin = max(self.free["memory bus"], self.pending[0][1])
        return min(each for each in self.pending if each[1] <= begin)

    def update(self, piece: int, ready: float, following: int) -> None:
        """Add the update of a piece, from ``ready`` on, and the drive's read for the following one."""
        self.expect(piece, ready)
        self.expect(following, ready)
        begin = max(self.read.pop(piece), ready)
        end = self.put("memory bus", f"update {piece}", begin, self.late["memory bus"])
        self.put("drive", f"write state {piece}", end, self.late["drive"] / 2)
        end = self.put("down", f"weights {piece}", end, self.late["down"])
        self.updated[piece] = self.put("up", f"weights {piece}", end, self.late["up"])

    def expect(self, piece: int, ready: float) -> None:
        """Add the drive's read of a piece's state."""
        if piece in range(self.pieces) and piece not in self.read:
            self.read[piece] = self.put("drive", f"read state {piece}", ready, self.late["drive"] / 2)
