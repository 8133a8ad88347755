"""Blocks of rows of one weight: an operation gathers one block at a time and computes with it.

A row is an index of the first dimension. In a weight of three dimensions it is a matrix, and a block.

The blocks depend only on the number of rows. So the bits depend on whether a weight is gathered by rows, and not on
``max_bytes``, tier, or ranks. A rest of less than half a block belongs to the block before it, because products of few
columns round differently from products of many. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

BLOCK_ROWS = 1024
SLOTS = 2  # the block that is used, and the next one
MATRICES = 6  # of two indexed experts, and the next two


@dataclass(frozen=True)
class RowBlock:
    """Rows [begin, end) of a weight in blocks, and their number in ``Geometry.by_block``."""

    number: int
    begin: int
    end: int


def row_blocks(rows: int, step: int = BLOCK_ROWS) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each block of ``rows`` rows."""
    count = max(1, (rows + step // 2) // step)
    for number in range(count):
        yield number * step, rows if number + 1 == count else (number + 1) * step


def block_rows(shape: torch.Size) -> int:
    """Return the rows of a block, but for the last one."""
    return BLOCK_ROWS if len(shape) == 2 else 1


def row_width(shape: torch.Size) -> int:
    """Return the elements of a row."""
    return math.prod(shape[1:])


def used_rows(indices: torch.Tensor, rows: int) -> torch.Tensor:
    """Return for each block minus the first of ``indices`` in it, and one more than the last, int64 [2, blocks].

    Without indices: -rows, and 0. So the maximum over ranks spans the rows that any rank uses. indices: int64, flat.
    """
    count = len(list(row_blocks(rows)))
    block = (indices // BLOCK_ROWS).clamp_(max=count - 1)
    used = torch.stack((torch.full((count,), -rows), torch.zeros(count, dtype=torch.int64)))
    used[0].scatter_reduce_(0, block, -indices, "amax")
    used[1].scatter_reduce_(0, block, indices + 1, "amax")
    return used


def used_ranges(used: torch.Tensor, rows: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the rows of ``used`` for each block with used rows: multiples of ``step``, or the
    block's begin or end."""
    for (begin, end), first, last in zip(row_blocks(rows), (-used[0]).tolist(), used[1].tolist(), strict=True):
        if first < last:
            yield max(begin, first // step * step), min(end, -(-last // step) * step)


def largest_block(shape: torch.Size) -> int:
    """Return the rows of the largest block of a weight."""
    return max(end - begin for begin, end in row_blocks(shape[0], block_rows(shape)))


def block_slots(shapes: Iterable[torch.Size]) -> int:
    """Return the elements of each of the SLOTS that weights of ``shapes`` are gathered into."""
    return max((largest_block(shape) * row_width(shape) for shape in shapes), default=0)


def slots_nbytes(shapes: Iterable[torch.Size], itemsize: int, page: int = 1) -> int:
    """Return the bytes of all SLOTS, each of whole pages of ``page`` bytes."""
    return SLOTS * -(-block_slots(shapes) * itemsize // page) * page


def matrices_nbytes(shapes: Iterable[torch.Size], itemsize: int, page: int) -> int:
    """Return the bytes of MATRICES of weights of three dimensions, each of whole pages of ``page`` bytes."""
    return MATRICES * -(-block_slots(shape for shape in shapes if len(shape) == 3) * itemsize // page) * page


def blocks_of_shape(shape: torch.Size, align: int) -> list[torch.Size]:
    """Return the shapes of the blocks that a weight is laid out in, from row_blocks.

    Blocks are joined until their elements are a multiple of ``align``.
    """
    found, begin = [], 0
    for _, end in row_blocks(shape[0], block_rows(shape)):
        if end == shape[0] or (end - begin) * row_width(shape) % align == 0:
            found.append(torch.Size((end - begin, *shape[1:])))
            begin = end
    return found


def can_be_blocks(param: nn.Parameter, modules: Sequence[nn.Module]) -> bool:
    """Return True if ``param`` is the weight of each of ``modules``, Linears and Embeddings that can use it by rows."""
    return param.dim() == 2 and bool(modules) and all(_can_use(param, module) for module in modules)


def _can_use(param: nn.Parameter, module: nn.Module) -> bool:
    if isinstance(module, nn.Linear):
        return module.weight is param and type(module).forward is nn.Linear.forward
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.sparse
        return plain and module.weight is param and type(module).forward is nn.Embedding.forward
    return False
