"""Notices between ranks, separate from operations: entered, failed, left, deadline suspended or resumed.

MPI itself does not report which rank is late or why a peer failed. A notice is one small eager message; a waiting
thread polls for it.
[Note: attendance] A rank that has waited a while at the entry of operation n notifies all ranks that it entered. A rank
that receives this notice while it waits for the same n answers once. At the deadline, ranks without a notice are named.
Thread rule: under the lock of its Progress.
"""

from __future__ import annotations

import struct
import time
from enum import IntEnum

from mpi4py import MPI

_FORMAT = struct.Struct("<BQ")
_ROOM = 1024
TAG = 3  # messages have 4 * t, 4 * n + 1 and 4 * n + 2 (_mpi_messages), collectives 7


class Notice(IntEnum):
    HERE = 0
    FAILED = 1
    TIMED_OUT = 2
    MISMATCH = 3
    LEFT = 4
    SUSPENDED = 5
    RESUMED = 6


class Notices:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._in_flight: list[tuple[MPI.Request, bytes]] = []
        self._sent_here = 0
        self.here = [0] * comm.size  # the latest operation that each rank is known to have entered
        self.suspended: set[int] = set()
        self.left: dict[int, tuple[int, float]] = {}  # rank -> its last operation, and the time of its notice

    def send(self, kind: Notice, sequence: int = 0, text: str = "", only: int = -1) -> None:
        """Send a notice to all other ranks, or to rank ``only``; never blocks."""
        message = _FORMAT.pack(kind, sequence) + text.encode(errors="replace")[: _ROOM - _FORMAT.size]
        for peer in range(self._comm.size):
            if peer != self._rank and only in (-1, peer):
                self._in_flight.append((self._comm.Isend([message, MPI.BYTE], dest=peer, tag=TAG), message))
        self.flush()

    def send_here(self, sequence: int) -> None:
        if sequence > self._sent_here:
            self._sent_here = sequence
            self.send(Notice.HERE, sequence)

    def receive(self, waiting_for: int) -> tuple[Notice, int, str] | None:
        """Process arrived notices; return the first notice that ends operations: (kind, rank, text).

        waiting_for: the operation that this rank waits to enter, or 0.
        """
        status = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=TAG, status=status):
            buffer = bytearray(_ROOM)
            peer = status.Get_source()
            self._comm.Recv([buffer, MPI.BYTE], source=peer, tag=TAG)
            kind, sequence = _FORMAT.unpack_from(buffer)
            if kind == Notice.HERE:
                self.here[peer] = max(self.here[peer], sequence)
                if sequence == waiting_for:
                    self.send_here(sequence)
            elif kind == Notice.SUSPENDED:
                self.suspended.add(peer)
            elif kind == Notice.RESUMED:
                self.suspended.discard(peer)
            elif kind == Notice.LEFT:
                self.left[peer] = (sequence, time.monotonic())
            else:
                text = bytes(buffer[_FORMAT.size :]).rstrip(b"\0").decode(errors="replace")
                return Notice(kind), peer, text
        return None

    def missing(self, sequence: int) -> list[int]:
        """Return the ranks that have sent no notice of entering operation ``sequence``."""
        return [r for r in range(self._comm.size) if r != self._rank and self.here[r] < sequence]

    def flush(self) -> bool:
        """Return True if all notices have been sent."""
        self._in_flight = [pair for pair in self._in_flight if not pair[0].Test()]
        return not self._in_flight
