"""The timed operations: the benches read all facts of an operation from its entry of OPERATIONS.

N is the size in a row, of the larger buffer of a rank. P: ranks. Sources: nccl-tests doc/PERFORMANCE.md
(busbw), docs/internals/algorithms.md section 1 (bytes through memory and slots).
A new operation is a new entry. A peer without a call in it has a dash in the operation's rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TYPES = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
REDUCTIONS = ("sum", "avg", "min", "max", "prod")

Call = Callable[[], object]
OfWorld = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation: its bytes, its buffers, its result, and its call in each library.

    Bytes, given P. bus_factor: busbw / algbw. memory_factor: bytes through memory per rank and byte of N that no
    algorithm on one host can avoid. footprint: bytes of all buffers of a rank per byte of N. slot_factor: bytes written
    to and read from staging slots per rank and byte of N, all of them cache hits. ring_passes: times that N goes around
    a ring over links; 0: no ring carries it.

    Buffers. parts: N is dealt to P ranks. in_part, out_part: a rank's input or output is its part, N/P. in_place: they
    are one buffer. root: the rank with the one input that counts. least_ranks: P at least.

    Result. source: for copies, the rank and the index in the numbering of `check.value` that element j of rank `me`'s
    result comes from. None: the operation is a reduction.

    Calls: functions of a library, the reduction in its words, input and output, which return the timed call.
    """

    name: str
    bus_factor: OfWorld
    memory_factor: OfWorld
    footprint: OfWorld
    slot_factor: OfWorld
    ring_passes: int = 0
    parts: bool = False
    in_part: bool = False
    out_part: bool = False
    in_place: bool = False
    root: int | None = None
    least_ranks: int = 1
    source: Callable[[Any, int, int, int], tuple[Any, Any]] | None = None  # j, me, P, N/P -> rank, index
    zcomm: Callable[[Any, str, Tensor, Tensor], Call]  # the module, reduction, input, output
    torch: Callable[[Any, Any, Any, Tensor, Tensor], Call] | None = None  # torch.distributed, its group, ...
    mpi: Callable[[Any, Any, Any, Any, Any], Call] | None = None  # mpi4py.MPI, its communicator, ...
    deepspeed: Callable[[Any, Tensor], Call] | None = None  # torch, output

    @property
    def reduces(self) -> bool:
        return self.source is None

    @property
    def reduces_for_all(self) -> bool:
        """True if every rank gets the whole reduction."""
        return self.reduces and not self.out_part

    def buffers(self, count: int, world: int, empty: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """Allocate input and output of a rank, one tensor if in place. count: elements of the larger."""
        inp = empty(count // world if self.in_part else count)
        return inp, inp if self.in_place else empty(count // world if self.out_part else count)


def _neighbours(rank: int, world: int) -> tuple[int, int]:
    """Return the rank after, to which sendrecv sends, and the one before, from which it receives."""
    return (rank + 1) % world, (rank - 1) % world


def _sendrecv_zcomm(zcomm: Any, _redop: str, inp: Tensor, out: Tensor) -> Call:
    after, before = _neighbours(zcomm.rank(), zcomm.world_size())

    def call() -> None:
        work = zcomm.send(inp, after, async_op=True)
        zcomm.recv(out, before)
        work.wait()

    return call


def _sendrecv_torch(dist: Any, group: Any, _op: Any, inp: Tensor, out: Tensor) -> Call:
    after, before = _neighbours(dist.get_rank(group), dist.get_world_size(group))

    def call() -> None:
        work = dist.isend(inp, after, group=group)
        dist.recv(out, before, group=group)
        work.wait()

    return call


def _sendrecv_mpi(_mpi: Any, comm: Any, _op: Any, inp: Any, out: Any) -> Call:
    after, before = _neighbours(comm.rank, comm.size)
    return lambda: comm.Sendrecv(inp, after, recvbuf=out, source=before)


def _reduce_scatter_torch(dist: Any, group: Any, op: Any, inp: Tensor, out: Tensor) -> Call:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed by newer torch
    return lambda: call(out, inp, op=op, group=group)


def _all_gather_torch(dist: Any, group: Any, _op: Any, inp: Tensor, out: Tensor) -> Call:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed by newer torch
    return lambda: call(out, inp, group=group)


OPERATIONS = {
    operation.name: operation
    for operation in (
        # Each input byte is read once, each output byte written once.
        Operation(
            name="all_reduce",
            bus_factor=lambda p: 2 * (p - 1) / p,
            memory_factor=lambda p: 2.0,
            footprint=lambda p: 1.0,
            slot_factor=lambda p: 3 * (p - 1) / p + 1 / p,  # in: write; reduce: read, write own; out: read
            ring_passes=2,
            in_place=True,
            zcomm=lambda zcomm, redop, inp, out: lambda: zcomm.all_reduce(out, redop),
            torch=lambda dist, group, op, inp, out: lambda: dist.all_reduce(out, op=op, group=group),
            mpi=lambda mpi, comm, op, inp, out: lambda: comm.Allreduce(mpi.IN_PLACE, out, op),
            deepspeed=lambda torch, out: lambda: torch.ops.deepspeed.inference_all_reduce_(out),
        ),
        Operation(
            name="reduce_scatter",
            bus_factor=lambda p: (p - 1) / p,
            memory_factor=lambda p: 1 + 1 / p,
            footprint=lambda p: 1 + 1 / p,
            slot_factor=lambda p: 2 * (p - 1) / p,
            ring_passes=1,
            parts=True,
            out_part=True,
            zcomm=lambda zcomm, redop, inp, out: lambda: zcomm.reduce_scatter(inp, redop, out=out),
            torch=_reduce_scatter_torch,
            mpi=lambda mpi, comm, op, inp, out: lambda: comm.Reduce_scatter_block(inp, out, op),
        ),
        Operation(
            name="all_gather",
            bus_factor=lambda p: (p - 1) / p,
            memory_factor=lambda p: 1 + 1 / p,
            footprint=lambda p: 1 + 1 / p,
            slot_factor=lambda p: 1 / p + (p - 1) / p,
            ring_passes=1,
            parts=True,
            in_part=True,
            source=lambda j, me, p, part: (j // part, j),
            zcomm=lambda zcomm, redop, inp, out: lambda: zcomm.all_gather(inp, out=out),
            torch=_all_gather_torch,
            mpi=lambda mpi, comm, op, inp, out: lambda: comm.Allgather(inp, out),
        ),
        # One rank's N is read, P-1 ranks' N are written: P N in all, when every rank carries a part of it.
        Operation(
            name="broadcast",
            bus_factor=lambda p: 1.0,
            memory_factor=lambda p: 1.0,
            footprint=lambda p: 1.0,
            slot_factor=lambda p: 1.0,
            in_place=True,
            root=0,
            source=lambda j, me, p, part: (0, j),
            zcomm=lambda zcomm, redop, inp, out: lambda: zcomm.broadcast(out, root=0),
            torch=lambda dist, group, op, inp, out: lambda: dist.broadcast(out, src=0, group=group),
            mpi=lambda mpi, comm, op, inp, out: lambda: comm.Bcast(out, 0),
        ),
        Operation(
            name="all_to_all",
            bus_factor=lambda p: (p - 1) / p,
            memory_factor=lambda p: 2.0,
            footprint=lambda p: 2.0,
            slot_factor=lambda p: 2 * (p - 1) / p,
            parts=True,
            source=lambda j, me, p, part: (j // part, me * part + j % part),
            zcomm=lambda zcomm, redop, inp, out: lambda: zcomm.all_to_all(out, inp),
            torch=lambda dist, group, op, inp, out: lambda: dist.all_to_all_single(out, inp, group=group),
            mpi=lambda mpi, comm, op, inp, out: lambda: comm.Alltoall(inp, out),
        ),
        # To the next rank, from the one before.
        Operation(
            name="sendrecv",
            bus_factor=lambda p: 1.0,
            memory_factor=lambda p: 2.0,
            footprint=lambda p: 2.0,
            slot_factor=lambda p: 2.0,
            least_ranks=2,
            source=lambda j, me, p, part: ((me - 1) % p, j),
            zcomm=_sendrecv_zcomm,
            torch=_sendrecv_torch,
            mpi=_sendrecv_mpi,
        ),
    )
}
