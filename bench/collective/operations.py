"""The operations that are timed: their buffers, their result, their call, and the bytes they cannot avoid.

N is the size that a row shows: that of the larger buffer of a rank. P: ranks. Sources: nccl-tests doc/PERFORMANCE.md
(busbw), docs/internals/algorithms.md section 1 (bytes through memory).
A new operation has an entry in OPERATIONS and in ``zcomm_call`` here, in model.py's tables, and one for each peer that
has it in peers.py. The column of a peer without one is a dash.
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


@dataclass(frozen=True)
class Operation:
    """One row of the byte table.

    bus_factor: busbw / algbw, given P. memory_factor: bytes through memory per rank and byte of N that no algorithm on
    one host can avoid, given P. parts: whether N is dealt to P ranks. source: for results that are copies, the rank and
    the index in the numbering of `value` that element j of rank `me`'s result comes from. None: the operation is a
    reduction.
    """

    name: str
    bus_factor: Callable[[int], float]
    memory_factor: Callable[[int], float]
    parts: bool = False
    in_place: bool = False
    source: Callable[[Any, int, int, int], tuple[Any, Any]] | None = None  # j, me, P, N/P -> rank, index

    @property
    def reduces(self) -> bool:
        return self.source is None

    def in_count(self, count: int, world: int) -> int:
        return count // world if self.name == "all_gather" else count

    def out_count(self, count: int, world: int) -> int:
        return count // world if self.name == "reduce_scatter" else count


OPERATIONS = {
    operation.name: operation
    for operation in (
        # Each input byte is read once, each output byte written once.
        Operation("all_reduce", lambda p: 2 * (p - 1) / p, lambda p: 2.0, in_place=True),
        Operation("reduce_scatter", lambda p: (p - 1) / p, lambda p: 1 + 1 / p, parts=True),
        Operation(
            "all_gather",
            lambda p: (p - 1) / p,
            lambda p: 1 + 1 / p,
            parts=True,
            source=lambda j, me, p, part: (j // part, j),
        ),
        # One rank's N is read, P-1 ranks' N are written: P N in all, when every rank carries a part of it.
        Operation("broadcast", lambda p: 1.0, lambda p: 1.0, in_place=True, source=lambda j, me, p, part: (0, j)),
        Operation(
            "all_to_all",
            lambda p: (p - 1) / p,
            lambda p: 2.0,
            parts=True,
            source=lambda j, me, p, part: (j // part, me * part + j % part),
        ),
        # To the next rank, from the one before.
        Operation("sendrecv", lambda p: 1.0, lambda p: 2.0, source=lambda j, me, p, part: ((me - 1) % p, j)),
    )
}


def zcomm_call(operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Callable[[], object]:
    import zcomm

    rank, world = zcomm.rank(), zcomm.world_size()
    after, before = (rank + 1) % world, (rank - 1) % world

    def sendrecv() -> None:
        work = zcomm.send(inp, after, async_op=True)
        zcomm.recv(out, before)
        work.wait()

    return {
        "all_reduce": lambda: zcomm.all_reduce(out, redop),
        "reduce_scatter": lambda: zcomm.reduce_scatter(inp, redop, out=out),
        "all_gather": lambda: zcomm.all_gather(inp, out=out),
        "broadcast": lambda: zcomm.broadcast(out, root=0),
        "all_to_all": lambda: zcomm.all_to_all(out, inp),
        "sendrecv": sendrecv,
    }[operation.name]
