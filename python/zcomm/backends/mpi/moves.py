"""The collectives as steps over MPI requests: MPI moves bytes, the core's kernel reduces (decisions D2, D3).

MPI chooses the order of its sums; zcomm sums in rank order, 16-bit floats in fp32 with one rounding. So rank r receives
chunk r of every rank's block, reduces it in rank order and sends it back. The bits are the same as over shared memory.
Blocks bound the receive memory (one block per rank and two in flight) and keep each message below 2^31 bytes.
[Note: order of messages] All ranks post the messages of a pair in the same order under one tag. MPI does not let them
overtake. Source: docs/backends.md, section "MPI".
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from zcomm import _core
from zcomm.backends.mpi.blocks import (
    ITEMSIZE,
    Block,
    Slots,
    Spans,
    block_elements,
    blocks,
    chunk_bounds,
    locate,
    pack,
    total,
    unpack,
)
from zcomm.backends.mpi.progress import Steps

TAG = 7
SMALL_NBYTES = 8 << 10  # up to here all_reduce gathers all inputs on all ranks: one step instead of two

_Move = Callable[[int, int, int], list[MPI.Request]]  # peer, address, nbytes


def memory_at(address: int, nbytes: int) -> list[object]:
    return [MPI.memory.fromaddress(address, nbytes), MPI.BYTE]


class Moves:
    """The collectives of one communicator. A root of -1 means all ranks."""

    def __init__(self, comm: MPI.Intracomm, block_nbytes: int) -> None:
        self.comm = comm
        self.block_nbytes = block_nbytes
        self.message_nbytes = 1 << 30  # of all_to_all; MPI counts with 32 bits
        self.rank = comm.rank
        self.ranks = comm.size
        self.peers = [(self.rank + step) % self.ranks for step in range(1, self.ranks)]  # not rank 0 first for all
        self.slots = Slots(self.ranks)

    def _send(self, peer: int, address: int, nbytes: int) -> list[MPI.Request]:
        return [self.comm.Isend(memory_at(address, nbytes), dest=peer, tag=TAG)] if nbytes else []

    def _receive(self, peer: int, address: int, nbytes: int) -> list[MPI.Request]:
        return [self.comm.Irecv(memory_at(address, nbytes), source=peer, tag=TAG)] if nbytes else []

    # --- reductions over whole buffers ----------------------------------------------------------------------------

    def all_reduce(self, spans: Spans, dtype: _core.DType, op: _core.ReduceOp) -> Steps:
        if total(spans) * ITEMSIZE[dtype] <= SMALL_NBYTES:
            return self._all_reduce_small(spans, dtype, op)
        return self.reduce(spans, dtype, op, root=-1)

    def _all_reduce_small(self, spans: Spans, dtype: _core.DType, op: _core.ReduceOp) -> Steps:
        size, count = ITEMSIZE[dtype], total(spans)
        for pieces in blocks(spans, max(1, count)):  # one block, or none
            own = locate(spans, pieces, size, self.slots)
            pack(own)
            gathered = self.slots.take(own.nbytes * self.ranks)
            whole = memory_at(gathered, own.nbytes * self.ranks)
            yield [self.comm.Iallgather(memory_at(own.address, own.nbytes), whole)]
            inputs = [gathered + rank * own.nbytes for rank in range(self.ranks)]
            _core.reduce([own.address], inputs, count, dtype, dtype, op)
            unpack(own)
            self.slots.give(own, gathered)

    def reduce(self, spans: Spans, dtype: _core.DType, op: _core.ReduceOp, root: int) -> Steps:
        """Reduce in two phases per block; the second phase of a block overlaps the first phase of the next."""
        size = ITEMSIZE[dtype]
        returning: list[MPI.Request] = []
        before: tuple[Block, int] | None = None
        for pieces in blocks(spans, block_elements(self.block_nbytes, size)):
            block = locate(spans, pieces, size, self.slots)
            pack(block)
            bounds = [b * size for b in chunk_bounds(block.nbytes // size, self.ranks)]
            own_at, own = bounds[self.rank], bounds[self.rank + 1] - bounds[self.rank]
            arrived = self.slots.take(max(1, own * self.ranks))
            requests = []
            for peer in self.peers:
                requests += self._receive(peer, arrived + peer * own, own)
            for peer in self.peers:
                requests += self._send(peer, block.address + bounds[peer], bounds[peer + 1] - bounds[peer])
            yield requests + returning
            self._end_block(before, root)
            inputs = [arrived + rank * own for rank in range(self.ranks)]
            inputs[self.rank] = block.address + own_at
            mine = root in (-1, self.rank)
            result = block.address + own_at if mine else arrived + self.rank * own
            if own:
                _core.reduce([result], inputs, own // size, dtype, dtype, op)
            returning = []
            for peer in self.peers:
                if mine:
                    returning += self._receive(peer, block.address + bounds[peer], bounds[peer + 1] - bounds[peer])
            for peer in self.peers:
                if root in (-1, peer):
                    returning += self._send(peer, result, own)
            before = (block, arrived)
        yield returning
        self._end_block(before, root)

    def _end_block(self, block: tuple[Block, int] | None, root: int) -> None:
        if block is not None:
            if root in (-1, self.rank):
                unpack(block[0])
            self.slots.give(*block)

    def reduce_scatter(
        self,
        spans: Spans,
        out: Spans,
        dtype: _core.DType,
        op: _core.ReduceOp,
        out_dtype: _core.DType,
        accumulate: bool,
    ) -> Steps:
        size, out_size = ITEMSIZE[dtype], ITEMSIZE[out_dtype]
        for pieces in blocks(out, block_elements(self.block_nbytes // self.ranks, size)):
            count = sum(piece.length for piece in pieces)
            mine = locate(spans, pieces, size, self.slots, self.rank)
            result = locate(out, pieces, out_size, self.slots)
            arrived = self.slots.take(count * size * self.ranks)
            requests = []
            leaving = []
            for peer in self.peers:
                requests += self._receive(peer, arrived + peer * count * size, count * size)
            for peer in self.peers:
                theirs = locate(spans, pieces, size, self.slots, peer)
                pack(theirs)
                leaving.append(theirs)
                requests += self._send(peer, theirs.address, theirs.nbytes)
            pack(mine)
            yield requests
            inputs = [arrived + rank * count * size for rank in range(self.ranks)]
            inputs[self.rank] = mine.address
            if accumulate:
                pack(result)
            _core.reduce([result.address], inputs, count, dtype, out_dtype, op, accumulate)
            unpack(result)
            self.slots.give(mine, result, arrived, *leaving)

    # --- movements ------------------------------------------------------------------------------------------------

    def broadcast(self, spans: Spans, dtype: _core.DType, root: int) -> Steps:
        size = ITEMSIZE[dtype]
        for pieces in blocks(spans, block_elements(self.block_nbytes, size)):
            block = locate(spans, pieces, size, self.slots)
            if self.rank == root:
                pack(block)
            yield [self.comm.Ibcast(memory_at(block.address, block.nbytes), root)]
            if self.rank != root:
                unpack(block)
            self.slots.give(block)

    def gather(self, spans: Spans, out: Spans, dtype: _core.DType, root: int) -> Steps:
        size = ITEMSIZE[dtype]
        for pieces in blocks(spans, block_elements(self.block_nbytes, size)):
            mine = locate(spans, pieces, size, self.slots)
            pack(mine)
            requests: list[MPI.Request] = []
            theirs: list[Block] = []
            if root in (-1, self.rank):
                for peer in self.peers:
                    theirs.append(locate(out, pieces, size, self.slots, peer))
                    requests += self._receive(peer, theirs[-1].address, theirs[-1].nbytes)
                own = locate(out, pieces, size, self.slots, self.rank)
                self._copy_own(mine, own)
                self.slots.give(own)
            for peer in self.peers:
                if root in (-1, peer):
                    requests += self._send(peer, mine.address, mine.nbytes)
            yield requests
            for place in theirs:
                unpack(place)
            self.slots.give(mine, *theirs)

    def scatter(self, spans: Spans, out: Spans, dtype: _core.DType, root: int) -> Steps:
        size = ITEMSIZE[dtype]
        for pieces in blocks(out, block_elements(self.block_nbytes, size)):
            mine = locate(out, pieces, size, self.slots)
            requests: list[MPI.Request] = []
            theirs: list[Block] = []
            if self.rank == root:
                for peer in self.peers:
                    theirs.append(locate(spans, pieces, size, self.slots, peer))
                    pack(theirs[-1])
                    requests += self._send(peer, theirs[-1].address, theirs[-1].nbytes)
                own = locate(spans, pieces, size, self.slots, self.rank)
                pack(own)
                self._copy_own(own, mine)
                self.slots.give(own)
            else:
                requests = self._receive(root, mine.address, mine.nbytes)
            yield requests
            if self.rank != root:
                unpack(mine)
            self.slots.give(mine, *theirs)

    def _copy_own(self, source: Block, to: Block) -> None:
        """Copy between two blocks of this rank, which may be the same memory; ``source`` is packed."""
        if to.address != source.address:
            ctypes.memmove(to.address, source.address, source.nbytes)
            unpack(to)

    def all_to_all(self, spans: Spans, out: Spans, dtype: _core.DType) -> Steps:
        """Exchange parts of any size; compare_parts() has compared the counts."""
        size = ITEMSIZE[dtype]
        requests: list[MPI.Request] = []
        for peer in self.peers:
            requests += self._pieces(out[peer], size, peer, self._receive)
        for peer in self.peers:
            requests += self._pieces(spans[peer], size, peer, self._send)
        (source, count), (to, _) = spans[self.rank], out[self.rank]
        ctypes.memmove(to, source, count * size)
        yield requests

    def _pieces(self, span: tuple[int, int], size: int, peer: int, move: _Move) -> list[MPI.Request]:
        address, nbytes = span[0], span[1] * size
        requests: list[MPI.Request] = []
        for at in range(0, nbytes, self.message_nbytes):
            requests += move(peer, address + at, min(self.message_nbytes, nbytes - at))
        return requests

    def compare_parts(self, spans: Spans, out: Spans) -> Steps:
        """Compare counts of all_to_all: ranks exchange their counts, then their first mismatch, if any."""
        sent = np.array([count for _, count in spans], dtype=np.int64)
        coming = np.zeros(self.ranks, dtype=np.int64)
        yield [self.comm.Ialltoall([sent, MPI.INT64_T], [coming, MPI.INT64_T])]
        wrong = [rank for rank in range(self.ranks) if coming[rank] != out[rank][1]]
        mismatch = np.array([wrong[0], coming[wrong[0]], out[wrong[0]][1]] if wrong else [-1, 0, 0], dtype=np.int64)
        mismatches = np.zeros((self.ranks, 3), dtype=np.int64)
        yield [self.comm.Iallgather([mismatch, MPI.INT64_T], [mismatches, MPI.INT64_T])]
        for rank, (source, count, expected) in enumerate(mismatches.tolist()):
            if source >= 0:
                raise _core.CollectiveMismatch(
                    f"all_to_all: rank {source} sends {count} elements to rank {rank}, which expects {expected}"
                )
