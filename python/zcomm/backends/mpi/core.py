"""MpiCore: a communicator over MPI with the interface of _core.Communicator, so that zcomm.comm works on it.

Before bytes move, ranks compare a digest of their calls (one 16-byte allgather; texts travel only when digests
differ). So a mismatch is an error on every rank, as over shared memory (decision D5).
All messages use one duplicate of MPI's communicator, with separate tags. It is not freed before MPI ends, because
MPI_Comm_free is collective and close() is not. Also, a late message must not reach a new communicator of this context.
Thread rule: as Progress. Source: MPI 4.0; decision D9.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from mpi4py import MPI

from zcomm import _core
from zcomm.backends.mpi.blocks import Spans, total
from zcomm.backends.mpi.messages import Messages
from zcomm.backends.mpi.moves import Moves
from zcomm.backends.mpi.progress import MpiWork, Progress, Steps, Task
from zcomm.bootstrap.deadlines import Deadlines

_TEXT_NBYTES = 512
_DIGEST_NBYTES = 16
_SHOWN_COUNTS = 4
_ANY = _core.ReduceOrder.any  # sums are in rank order in any case; ranks compare the option


class MpiCore:
    reads_own_parts = False

    def __init__(self, comm: MPI.Intracomm, deadlines: Deadlines, block_nbytes: int = 4 << 20) -> None:
        """Duplicate ``comm``, which the caller still owns. Collective."""
        self._comm = comm.Dup()
        self._deadlines = deadlines
        self._block_nbytes = block_nbytes
        self._moves = Moves(self._comm, block_nbytes)
        self._messages = Messages(self._comm)
        self._progress = Progress(self._comm, deadlines)
        self._pid = os.getpid()
        self._symmetric_nbytes = 0
        self._allocations = 0
        self.rank: int = self._comm.rank
        self.world_size: int = self._comm.size

    # --- collectives --------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        spans: Spans,
        dtype: _core.DType,
        op: _core.ReduceOp,
        name: str,
        async_op: bool,
        order: _core.ReduceOrder = _ANY,
    ) -> MpiWork | None:
        self._check_apart("all_reduce", [], spans, dtype)
        call = _Call("all_reduce", spans, dtype, name, op=op, order=order)
        return self._start(call, async_op, lambda: self._moves.all_reduce(spans, dtype, op))

    def reduce(
        self, spans: Spans, dtype: _core.DType, op: _core.ReduceOp, root: int, name: str, async_op: bool
    ) -> MpiWork | None:
        self._check_apart("reduce", [], spans, dtype)
        call = _Call("reduce", spans, dtype, name, op=op, root=root)
        return self._start(call, async_op, lambda: self._moves.reduce(spans, dtype, op, root))

    def reduce_scatter(
        self,
        spans: Spans,
        out: Spans,
        dtype: _core.DType,
        op: _core.ReduceOp,
        out_dtype: _core.DType,
        accumulate: bool,
        name: str,
        async_op: bool,
        order: _core.ReduceOrder = _ANY,
    ) -> MpiWork | None:
        call = _Call(
            *("reduce_scatter", spans, dtype, name), op=op, out_dtype=out_dtype, accumulate=accumulate, order=order
        )
        self._check_dealt(call.kind, spans, out)
        _core.check_overlap(call.kind, list(spans), list(out), dtype, out_dtype, self.rank, accumulate)
        steps = lambda: self._moves.reduce_scatter(spans, out, dtype, op, out_dtype, accumulate)  # noqa: E731
        return self._start(call, async_op, steps)

    def all_gather(self, spans: Spans, out: Spans, dtype: _core.DType, name: str, async_op: bool) -> MpiWork | None:
        self._check_dealt("all_gather", out, spans)
        self._check_apart("all_gather", spans, out, dtype)
        call = _Call("all_gather", out, dtype, name)
        return self._start(call, async_op, lambda: self._moves.gather(spans, out, dtype, root=-1))

    def broadcast(self, spans: Spans, dtype: _core.DType, root: int, name: str, async_op: bool) -> MpiWork | None:
        self._check_apart("broadcast", [], spans, dtype)
        call = _Call("broadcast", spans, dtype, name, root=root)
        return self._start(call, async_op, lambda: self._moves.broadcast(spans, dtype, root))

    def gather(
        self, spans: Spans, out: Spans, dtype: _core.DType, root: int, name: str, async_op: bool
    ) -> MpiWork | None:
        if self.rank == root:
            self._check_dealt("gather", out, spans)
            self._check_apart("gather", spans, out, dtype)
        call = _Call("gather", self._whole(spans), dtype, name, root=root)
        return self._start(call, async_op, lambda: self._moves.gather(spans, out, dtype, root))

    def scatter(
        self, spans: Spans, out: Spans, dtype: _core.DType, root: int, name: str, async_op: bool
    ) -> MpiWork | None:
        if self.rank == root:
            self._check_dealt("scatter", spans, out)
            self._check_apart("scatter", spans, out, dtype)
        call = _Call("scatter", self._whole(out), dtype, name, root=root)
        return self._start(call, async_op, lambda: self._moves.scatter(spans, out, dtype, root))

    def all_to_all(self, spans: Spans, out: Spans, dtype: _core.DType, name: str, async_op: bool) -> MpiWork | None:
        if len(spans) != self.world_size or len(out) != self.world_size:
            raise ValueError(
                f"all_to_all: {len(spans)} inputs and {len(out)} outputs: expected one for each of "
                f"{self.world_size} ranks"
            )
        self._check_apart("all_to_all", spans, out, dtype)

        def steps() -> Steps:
            yield from self._moves.compare_parts(spans, out)
            yield from self._moves.all_to_all(spans, out, dtype)

        return self._start(_Call("all_to_all", [], dtype, name), async_op, steps)

    def barrier(self, name: str, async_op: bool) -> MpiWork | None:
        return self._start(_Call("barrier", [], None, name), async_op, _nothing)

    def verify(self, behind: bool) -> None:
        """Return: every call was compared before its bytes moved."""

    def after(self, awaited: object, async_op: bool = True) -> MpiWork | None:
        raise NotImplementedError(
            "after: backend mpi cannot wait for another communicator's operation; use work.wait()"
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def send(self, spans: Spans, dtype: _core.DType, dst: int, tag: int, name: str, async_op: bool) -> MpiWork | None:
        self._check_message("send", "dst", dst, 0, tag)
        call = _Call("send", spans, dtype, name, peer=f"to rank {dst} tag={tag}")
        return self._submit(call, async_op, lambda _: self._messages.send(spans, dtype, dst, tag), peer=dst)

    def recv(
        self, spans: Spans, dtype: _core.DType, src: int, tag: int, name: str, async_op: bool, source: _core.Source
    ) -> MpiWork | None:
        self._check_message("recv", "src", src, -1, tag)
        self._check_apart("recv", [], spans, dtype)
        call = _Call("recv", spans, dtype, name, peer=f"from {'any rank' if src < 0 else f'rank {src}'} tag={tag}")
        steps: Callable[[Task], Steps] = lambda task: self._messages.recv(task, spans, dtype, src, tag, source)  # noqa: E731
        return self._submit(call, async_op, steps, peer=src)

    # --- memory, further communicators, end ---------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Any:
        """Allocate plain memory, zero-filled, page aligned: MPI copies anyway. Collective: same nbytes on each rank."""
        self._start(_Call("allocate", [(0, nbytes)], None, ""), False, _nothing)
        memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8) if nbytes else np.empty(0, dtype=np.uint8)
        self._allocations += 1
        self._symmetric_nbytes += nbytes
        weakref.finalize(memory, _forget, weakref.ref(self), nbytes)
        return memory

    def allocate_shared(self, nbytes: int) -> Any:
        raise NotImplementedError(
            f"shared_empty of {nbytes} bytes: ranks over MPI may be on different hosts and share no memory; "
            "use a private copy on each rank (ZeroOptimizer: share_parameters=False)"
        )

    def split(self, color: int | None, key: int, name: str) -> MpiCore | None:
        """Join the ranks of one color, ordered by key and then rank; None for a rank without color. Collective."""
        for word, value in (("color", color), ("key", key)):
            if value is not None and not (isinstance(value, int) and -(2**31) <= value < 2**31):
                raise ValueError(f"split: {word}={value!r} is not a 32-bit integer, as MPI has them")
        self._start(_Call("split", [], None, name), False, _nothing)
        part = self._comm.Split(MPI.UNDEFINED if color is None or color < 0 else color, key)
        return (
            None if part == MPI.COMM_NULL else MpiCore(cast("MPI.Intracomm", part), self._deadlines, self._block_nbytes)
        )

    def exchange(self, mine: object) -> list[Any]:
        """Return the objects of all ranks. Only for setup, because it blocks in MPI without a deadline."""
        return list(self._comm.allgather(mine))

    def suspend_deadline(self) -> None:
        self._progress.suspend(+1)

    def resume_deadline(self) -> None:
        self._progress.suspend(-1)

    def memory(self) -> dict[str, int]:
        return {
            "symmetric_nbytes": self._symmetric_nbytes,
            "shared_nbytes": 0,
            "slot_nbytes": self._moves.slots.nbytes + self._messages.nbytes,
            "allocation_count": self._allocations + 1,
        }

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._progress.close()

    def __del__(self) -> None:
        if hasattr(self, "_pid"):
            self.close()

    # --- from a call to a task ----------------------------------------------------------------------------------

    def _start(self, call: _Call, async_op: bool, steps: Callable[[], Steps]) -> MpiWork | None:
        if call.op is not None:
            check_reduction(call)
        if call.root is not None and not 0 <= call.root < self.world_size:
            raise ValueError(f"{call.kind}: root={call.root}: expected a rank in [0, {self.world_size})")

        def entered(task: Task) -> Steps:
            yield from self._compare(task, call)
            yield from steps()

        return self._submit(call, async_op, entered, collective=True)

    def _submit(
        self, call: _Call, async_op: bool, steps: Callable[[Task], Steps], peer: int = -1, collective: bool = False
    ) -> MpiWork | None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{call.kind}: this process was forked from rank {self.rank} after it had joined the job; "
                "a forked child cannot use the communicator (start it by spawn)"
            )
        task = Task(steps, call.describe, peer)
        self._progress.submit(task, collective, blocking=not async_op)
        return MpiWork(self._progress, task) if async_op else None

    def _compare(self, task: Task, call: _Call) -> Steps:
        """Wait until all ranks have entered, and raise CollectiveMismatch unless all called the same."""
        task.entering = True
        mine = blake2b(repr((task.sequence, call.identity())).encode(), digest_size=_DIGEST_NBYTES).digest()
        digests = bytearray(_DIGEST_NBYTES * self.world_size)
        yield [self._comm.Iallgather([mine, MPI.BYTE], [digests, MPI.BYTE])]
        if digests != mine * self.world_size:
            text = f"{call.describe()}".encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
            texts = bytearray(_TEXT_NBYTES * self.world_size)
            yield [self._comm.Iallgather([text, MPI.BYTE], [texts, MPI.BYTE])]
            raise _core.CollectiveMismatch(_mismatch(task.sequence, bytes(digests), bytes(texts)))
        task.entering = False

    def _check_dealt(self, what: str, whole: Spans, part: Spans) -> None:
        if len(whole) != len(part):
            raise ValueError(f"{what}: {len(whole)} buckets and {len(part)} shards")
        for index, ((_, all_of_it), (_, one)) in enumerate(zip(whole, part, strict=True)):
            if all_of_it != one * self.world_size:
                raise ValueError(
                    f"{what}: buffer {index}: count {all_of_it} is not world_size * count of the part = "
                    f"{self.world_size} * {one}"
                )

    def _check_apart(self, what: str, spans: Spans, out: Spans, dtype: _core.DType) -> None:
        _core.check_overlap(what, list(spans), list(out), dtype, dtype, self.rank)

    def _check_message(self, what: str, side: str, peer: int, lowest: int, tag: int) -> None:
        if not lowest <= peer < self.world_size or peer == self.rank:
            raise ValueError(f"{what}: {side}={peer}: expected another rank than {self.rank} in [0, {self.world_size})")
        if not 0 <= tag <= self._messages.tag_limit:
            raise ValueError(f"{what}: tag={tag}: expected 0 to {self._messages.tag_limit} over this MPI")

    def _whole(self, shards: Spans) -> list[tuple[int, int]]:
        return [(address, count * self.world_size) for address, count in shards]


class _Call:
    """Call of an operation: its identity, which ranks compare, and its text in errors."""

    def __init__(
        self,
        kind: str,
        spans: Spans,
        dtype: _core.DType | None,
        name: str,
        *,
        op: _core.ReduceOp | None = None,
        root: int | None = None,
        out_dtype: _core.DType | None = None,
        accumulate: bool = False,
        order: _core.ReduceOrder = _ANY,
        peer: str = "",
    ) -> None:
        self.kind, self.dtype, self.name, self.op, self.root = kind, dtype, name, op, root
        self.out_dtype, self.accumulate, self.peer = out_dtype or dtype, accumulate, peer
        self.order = order
        self.counts = [count for _, count in spans]
        self.total = total(spans)
        self._site = _core.call_site()

    def identity(self) -> tuple[object, ...]:
        return (
            *(self.kind, self.name, tuple(self.counts), self.accumulate, self.root),
            *(what and what.name for what in (self.dtype, self.out_dtype, self.op, self.order)),
        )

    def describe(self) -> str:
        """Describe the call as the core words it: "all_reduce float32 sum count=1024 'grad.3' at train.py:42"."""
        words = [self.kind]
        if self.dtype is not None:
            words.append(self.dtype.name)
        if self.out_dtype is not None and self.out_dtype != self.dtype:
            words.append(f"-> {self.out_dtype.name}")
        if self.op is not None:
            words.append(self.op.name)
        if self.order != _ANY:
            words.append("in rank order")
        if self.accumulate:
            words.append("accumulate")
        if self.root is not None:
            words.append(f"root={self.root}")
        if self.peer:
            words.append(self.peer)
        if self.kind == "allocate":
            words.append(f"nbytes={self.total}")
        elif self.counts:
            words.append(f"count={self.total}")
        if len(self.counts) > 1:
            shown = ", ".join(map(str, self.counts[:_SHOWN_COUNTS]))
            more = ", ..." if len(self.counts) > _SHOWN_COUNTS else ""
            words.append(f"in {len(self.counts)} buffers [{shown}{more}]")
        if self.name:
            words.append(f"'{self.name}'")
        if self._site:
            words.append(f"at {self._site}")
        return " ".join(words)


def check_reduction(call: _Call) -> None:
    """Raise the kernel's ValueError for a reduction that no rank can compute."""
    assert call.dtype is not None and call.out_dtype is not None and call.op is not None
    nowhere = np.zeros(8, dtype=np.uint8).ctypes.data
    try:
        _core.reduce([nowhere], [nowhere], 0, call.dtype, call.out_dtype, call.op)
    except ValueError as error:
        raise ValueError(f"{call.kind}: {error}") from None


def _mismatch(sequence: int, digests: bytes, texts: bytes) -> str:
    sides: dict[bytes, list[int]] = {}
    for rank in range(len(digests) // _DIGEST_NBYTES):
        digest = digests[rank * _DIGEST_NBYTES : (rank + 1) * _DIGEST_NBYTES]
        sides.setdefault(digest, []).append(rank)
    descriptions = []
    for ranks in sides.values():
        text = texts[ranks[0] * _TEXT_NBYTES : (ranks[0] + 1) * _TEXT_NBYTES].rstrip(b"\0").decode(errors="replace")
        descriptions.append(f"rank {', '.join(map(str, ranks))}: {text}")
    return f"ranks called different operations as number {sequence}: {'; '.join(descriptions)}"


def _forget(owner: weakref.ref[MpiCore], nbytes: int) -> None:
    if (core := owner()) is not None:
        core._symmetric_nbytes -= nbytes


def _nothing() -> Steps:
    yield from ()
