"""Cutting lists of buffers into blocks, and packing blocks that lie in several buffers. Pure index arithmetic.

A list is one flat range of elements; a block is a part of that range. A block inside one buffer is used in place; a
block that crosses buffers is packed into a slot. The cut depends only on total count and block size, so both
sides of a message agree on it even if their lists differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from zcomm.comm.tensors import DTYPES

ITEMSIZE = {core: dtype.itemsize for dtype, core in DTYPES.items()}
ALIGN = 64  # elements: chunks begin at multiples of it

Spans = Sequence[tuple[int, int]]  # (address, count)


class Piece(NamedTuple):
    """Elements [start, start + length) of buffer ``item``."""

    item: int
    start: int
    length: int


def blocks(spans: Spans, block: int) -> Iterator[list[Piece]]:
    """Cut the flat range of all buffers into blocks of ``block`` elements; empty buffers are in none."""
    pieces: list[Piece] = []
    room = block
    for item, (_, count) in enumerate(spans):
        start = 0
        while start < count:
            part = min(room, count - start)
            pieces.append(Piece(item, start, part))
            start += part
            room -= part
            if room == 0:
                yield pieces
                pieces, room = [], block
    if pieces:
        yield pieces


def block_elements(nbytes: int, itemsize: int) -> int:
    """Return how many elements a block of about ``nbytes`` has."""
    return max(ALIGN, nbytes // itemsize // ALIGN * ALIGN)


def chunk_bounds(count: int, ranks: int) -> list[int]:
    """Return the bounds of the chunks of ``count`` elements: chunk q is [bounds[q], bounds[q + 1])."""
    chunk = -(-count // ranks)
    chunk = -(-chunk // ALIGN) * ALIGN
    return [min(count, q * chunk) for q in range(ranks + 1)]


def total(spans: Spans) -> int:
    return sum(count for _, count in spans)


class Block(NamedTuple):
    """A block in memory: the address of its contiguous bytes, and the parts that they are packed from."""

    address: int
    nbytes: int
    parts: list[tuple[int, int]]  # (address, nbytes) in the user's buffers; empty if the block is used in place


def locate(spans: Spans, pieces: list[Piece], itemsize: int, slots: Slots, rank: int = -1) -> Block:
    """Locate ``pieces`` in ``spans``; with ``rank``, spans are buckets, and pieces index that rank's shards.

    ``slots.give(block)`` releases the slot of the result, if it has one. Nothing is copied yet.
    """
    parts = []
    for item, start, length in pieces:
        address, count = spans[item]
        if rank >= 0:
            start += rank * (count // slots.ranks)
        parts.append((address + start * itemsize, length * itemsize))
    if len(parts) == 1:
        return Block(*parts[0], [])
    nbytes = sum(part[1] for part in parts)
    return Block(slots.take(nbytes), nbytes, parts)


def pack(block: Block) -> None:
    """Copy the parts into the block's slot, unless it is used in place."""
    at = block.address
    for address, nbytes in block.parts:
        ctypes.memmove(at, address, nbytes)
        at += nbytes


def unpack(block: Block) -> None:
    """Copy the block's slot back to its parts."""
    at = block.address
    for address, nbytes in block.parts:
        ctypes.memmove(address, at, nbytes)
        at += nbytes


class Slots:
    """Reusable memory for packed blocks and for received inputs of reductions."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.nbytes = 0
        self._free: dict[int, list[int]] = {}  # size -> addresses
        self._owned: dict[int, tuple[int, np.ndarray]] = {}  # address -> size, memory

    def take(self, nbytes: int) -> int:
        size = 1 << max(12, (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        memory = np.empty(size + 64, dtype=np.uint8)
        address = -(-memory.ctypes.data // 64) * 64
        self._owned[address] = (size, memory)
        self.nbytes += size
        return address

    def give(self, *blocks: Block | int) -> None:
        for block in blocks:
            if isinstance(block, int):
                address = block
            elif block.parts:
                address = block.address
            else:
                continue
            self._free[self._owned[address][0]].append(address)
