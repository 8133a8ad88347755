"""Streams: weight, master and state of a parameter, assembled on one rank CHUNK_COUNT elements at a time.

A rank copies its elements of a chunk into zeros; the sum of all ranks' bit patterns is the chunk, exactly. Weights,
master and state arrays of a chunk are yielded together, so that each tile of state is read once.
Memory: a chunk of each array, and a tile or span of arrays on a drive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.layout.cut import Cut
from zcomm.zero.layout.tiles import decoded
from zcomm.zero.parts import Parts
from zcomm.zero.tensors import shard_io

CHUNK_COUNT = 1 << 19  # a multiple of STATE_BLOCK
WEIGHT, MASTER, SCALES = "weight", "master", "scales"
Chunk = dict[str, torch.Tensor]  # by key, flat; valid until the next chunk


def stream(parts: Parts, name: str, cut: Cut, index: int | None, keys: Sequence[str], root: int) -> Iterator[Chunk]:
    """Yield on rank ``root`` the values of ``keys`` of a whole parameter, in its order. Collective to the end.

    cut: the form of the whole. index: the parameter's number; None: this rank gives no elements.
    keys: WEIGHT (in the precision of training), MASTER (fp32; of a frozen parameter the weight), names of state arrays.
    With SCALES the arrays are 8-bit codes with the scales of their blocks; otherwise they are fp32.
    """
    memory, begin = torch.empty(0, dtype=torch.int32), 0
    for count, mine, alternate in cut.spans(CHUNK_COUNT):
        forms = [_form(parts, key, keys, count) for key in keys]
        counts = [-(-size * dtype.itemsize // 4) for dtype, size in forms]  # of words
        if memory.numel() < sum(counts):
            memory = torch.empty(sum(counts), dtype=torch.int32)
        words = memory[: sum(counts)].zero_()
        chunk = {
            key: part.view(dtype)[:size]
            for key, part, (dtype, size) in zip(keys, words.split(counts), forms, strict=True)
        }
        if index is not None and mine is not None and not alternate:
            _fill(parts, index, mine, chunk)
        elif index is not None and mine is not None:
            own = {key: torch.zeros(mine.stop - mine.start, dtype=part.dtype) for key, part in chunk.items()}
            _fill(parts, index, mine, own)
            for key, part in own.items():
                cut.place(chunk[key], part)
        parts.comm.reduce(words, root=root, name=f"elements {begin} to {begin + count} of {name}")
        begin += count
        if parts.comm.rank == root:
            yield chunk


def _form(parts: Parts, key: str, keys: Sequence[str], count: int) -> tuple[torch.dtype, int]:
    """Return dtype and count of a key's values of ``count`` elements."""
    form = parts.state.form
    if key == WEIGHT:
        return form.dtype, count
    if key == SCALES:
        return torch.float32, -(-count // STATE_BLOCK) * len(form.arrays)
    return (torch.uint8 if SCALES in keys and key != MASTER else torch.float32), count


def _fill(parts: Parts, index: int, elements: slice, chunk: Chunk) -> None:
    """Copy this rank's elements into the chunk. Local."""
    for bucket, mine in shard_io.by_bucket(shard_io.pieces(parts, index, elements, first=True)):
        part = slice(mine[0].tile.start, mine[-1].tile.stop)
        weights = parts.store.read(bucket, part) if {WEIGHT, MASTER} & chunk.keys() else None
        for piece in mine:
            target = slice(piece.flat.start - elements.start, piece.flat.stop - elements.start)
            weight = None if weights is None else weights[piece.tile.start - part.start : piece.tile.stop - part.start]
            _fill_piece(parts, index, piece, weight, chunk, target)


def _fill_piece(
    parts: Parts, index: int, piece: shard_io.Piece, weight: torch.Tensor | None, chunk: Chunk, target: slice
) -> None:
    form, inside = parts.state.form, piece.inside
    of_state = [key for key in chunk if key not in (WEIGHT, MASTER)]
    if weight is not None:
        if WEIGHT in chunk:
            chunk[WEIGHT][target] = weight[inside]
        if MASTER in chunk and shard_io.is_master(parts, index):
            chunk[MASTER][target] = weight[inside]
        elif MASTER in chunk:
            of_state.append(MASTER)
    if not of_state:
        return
    with parts.state.tile(piece.bucket.index, piece.tile) as state:
        if MASTER in of_state:
            assert weight is not None
            chunk[MASTER][target] = form.master(weight, state)[inside]
        if not form.coded:
            for key in of_state:
                if key != MASTER:
                    chunk[key][target] = form.array(state, piece.count, key)[inside]
            return
        codes = form.codes(state, piece.count, inside)
        if SCALES in chunk:
            scales = chunk[SCALES].view(-1, len(form.arrays))
            scales[target.start // STATE_BLOCK : -(-target.stop // STATE_BLOCK)] = codes[SCALES]
        values = codes if SCALES in chunk else decoded(codes)
        for key in form.arrays:
            if key in chunk:
                chunk[key][target] = values[key]
