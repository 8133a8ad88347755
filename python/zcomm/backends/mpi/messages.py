"""send and recv as steps over MPI requests, with the guard: both sides must mean the same dtype and count.

A message begins with an envelope on its tag. A small message carries its bytes in the envelope, so its send completes
without the receiver. For a large message the receiver first confirms the envelope, then the bytes follow in blocks.
[Note: numbers] The tags of answer and bytes contain the sender's number of the message. So two concurrent receives
cannot match each other's bytes, whichever envelope arrives first.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

from mpi4py import MPI

from zcomm import _core
from zcomm.backends.mpi.blocks import ITEMSIZE, Slots, Spans, block_elements, blocks, locate, pack, total, unpack
from zcomm.backends.mpi.moves import memory_at
from zcomm.backends.mpi.progress import Steps, Task

INLINE_NBYTES = 4 << 10
BLOCK_NBYTES = 4 << 20
WINDOW = 8  # blocks in flight
_ENVELOPE = struct.Struct("<iiqBB")  # sender, number, count, dtype, whether the bytes follow inline
_ANSWER_NBYTES = 512
_DTYPES = list(_core.DType.__members__.values())


class Messages:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._slots = Slots(1)
        self._last = [0] * comm.size  # number of the latest message to each rank
        bound = comm.Get_attr(MPI.TAG_UB)
        self.tag_limit = ((bound if isinstance(bound, int) else 32767) - 3) // 4  # 4t, 4n + 1, 4n + 2 are tags

    def send(self, spans: Spans, dtype: _core.DType, dst: int, tag: int) -> Steps:
        size, count = ITEMSIZE[dtype], total(spans)
        number = self._last[dst] = (self._last[dst] + 1) % self.tag_limit
        inline = count * size <= INLINE_NBYTES
        envelope = _ENVELOPE.pack(self._rank, number, count, _DTYPES.index(dtype), inline)
        if inline:
            envelope += b"".join(ctypes.string_at(address, n * size) for address, n in spans if n)
            yield [self._comm.Isend([envelope, MPI.BYTE], dest=dst, tag=4 * tag)]
            return
        answer = bytearray(_ANSWER_NBYTES)
        yield [
            self._comm.Isend([envelope, MPI.BYTE], dest=dst, tag=4 * tag),
            self._comm.Irecv([answer, MPI.BYTE], source=dst, tag=4 * number + 2),
        ]
        refusal = bytes(answer).rstrip(b"\0").decode(errors="replace")
        if refusal:
            raise _core.CollectiveMismatch(refusal)
        yield from self._move(spans, size, lambda at: self._comm.Isend(at, dest=dst, tag=4 * number + 1), sends=True)

    def recv(self, task: Task, spans: Spans, dtype: _core.DType, src: int, tag: int, source: _core.Source) -> Steps:
        size, count = ITEMSIZE[dtype], total(spans)
        buffer = bytearray(_ENVELOPE.size + INLINE_NBYTES)
        task.revocable = True
        yield [self._comm.Irecv([buffer, MPI.BYTE], source=MPI.ANY_SOURCE if src < 0 else src, tag=4 * tag)]
        task.revocable = False
        sender, number, sent, kind, inline = _ENVELOPE.unpack_from(buffer)
        source.rank = sender
        refusal = ""
        if sent != count or _DTYPES[kind] != dtype:
            refusal = (
                f"rank {sender} sends {_DTYPES[kind].name} count={sent} with tag={tag}, "
                f"rank {self._rank} receives {dtype.name} count={count}"
            )
        if not inline:
            answer = refusal.encode()[:_ANSWER_NBYTES]
            yield [self._comm.Isend([answer, MPI.BYTE], dest=sender, tag=4 * number + 2)]
        if refusal:
            mismatch = _core.CollectiveMismatch(refusal)
            if inline:  # its sender has already completed: Progress sends it the error
                mismatch.sender = sender  # type: ignore[attr-defined]
            raise mismatch
        if inline:
            at = _ENVELOPE.size
            for address, n in spans:
                ctypes.memmove(address, bytes(buffer[at : at + n * size]), n * size)
                at += n * size
            return
        yield from self._move(spans, size, lambda at: self._comm.Irecv(at, source=sender, tag=4 * number + 1), False)

    def _move(self, spans: Spans, size: int, start: Callable[[list[object]], MPI.Request], sends: bool) -> Steps:
        cut = list(blocks(spans, block_elements(BLOCK_NBYTES, size)))
        for first in range(0, len(cut), WINDOW):
            places = [locate(spans, pieces, size, self._slots) for pieces in cut[first : first + WINDOW]]
            if sends:
                for place in places:
                    pack(place)
            yield [start(memory_at(place.address, place.nbytes)) for place in places]
            if not sends:
                for place in places:
                    unpack(place)
            self._slots.give(*places)

    @property
    def nbytes(self) -> int:
        return self._slots.nbytes
