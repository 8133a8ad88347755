"""Layouts of block-sparse attention: which blocks of keys each block of queries reads, as DeepSpeed's classes.

A layout is an integer tensor [heads, S / block, S / block], 1 if a block of queries (row) reads a block of keys
(column). ``attention="unidirectional"`` is a matter of blocks: inside of a block the causal mask is the caller's.
Random blocks come from the configuration's own generator, which begins alike on all ranks. So no rank sends a layout,
and a program that runs again has the same ones. Layers that share a configuration get different blocks.
Sources: Child et al. (2019) for the fixed layout, Zaheer et al. (2020) for BigBird, Beltagy et al. (2020) for the
sliding window with global blocks (Longformer).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

DIRECTIONS = ("unidirectional", "bidirectional")


class SparsityConfig:
    """Heads, the size of a block, and whether heads differ, for all layouts.

    num_heads: heads of the attention. block: tokens of a block. different_layout_per_head: heads have layouts of
    their own if the class knows several; else each head has the first one's. ``generator.seed`` varies random blocks.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        if num_heads < 1 or block < 1:
            raise ValueError(f"num_heads={num_heads}, block={block}: both are at least 1")
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        self.generator = random.Random(0)

    def setup_layout(self, seq_len: int) -> torch.Tensor:
        """Return a layout of zeros for seq_len tokens. Raises: ValueError if the last block is short."""
        blocks, rest = divmod(seq_len, self.block)
        if rest:
            raise ValueError(f"{seq_len} tokens do not fill blocks of {self.block}: pad them")
        return torch.zeros(self.num_heads, blocks, blocks, dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: torch.Tensor) -> torch.Tensor:
        """Return ``layout``, with the first head's rows for all heads unless heads differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout

    def make_layout(self, seq_len: int) -> torch.Tensor:
        """Return the layout for seq_len tokens, [num_heads, seq_len / block, seq_len / block]. Raises: ValueError."""
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            layout[head] = self._of_head(head, layout.shape[1])
        return self.check_and_propagate_first_head_layout(layout)

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no layout: use one of its subclasses")


class DenseSparsityConfig(SparsityConfig):
    """Each block reads all blocks, for comparisons."""

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        return torch.ones(blocks, blocks, dtype=torch.int64)


class FixedSparsityConfig(SparsityConfig):
    """Windows of num_local_blocks, and the last num_global_blocks of each window for all later (or all) blocks.

    num_different_global_patterns: heads take turns at so many places of a window for its global blocks, from its end
    to its begin. horizontal_global_attention: global blocks read all blocks, too (bidirectional only).
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_local_blocks={num_local_blocks} is not a multiple of {num_global_blocks} global blocks"
            )
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns={num_different_global_patterns} needs different_layout_per_head=True"
            )
        if num_different_global_patterns > num_local_blocks // num_global_blocks:
            raise ValueError(
                f"num_different_global_patterns={num_different_global_patterns}: a window of {num_local_blocks} blocks "
                f"has {num_local_blocks // num_global_blocks} places for {num_global_blocks} global blocks"
            )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = _direction(attention)
        self.horizontal_global_attention = _horizontal(horizontal_global_attention, attention)
        self.num_different_global_patterns = num_different_global_patterns

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        size, wide = self.num_local_blocks, self.num_global_blocks
        layout = _windows([size], blocks, self.attention)
        place = size - (1 + head % self.num_different_global_patterns) * wide
        starts = [window + place for window in range(0, blocks - blocks % size, size)]
        if blocks % size:  # the last window is short
            starts.append(min(blocks - blocks % size + place, blocks - wide))
        return _with_global(
            layout, [(each, each + wide) for each in starts], self.attention, self.horizontal_global_attention
        )


class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, given global blocks, and random blocks in each row.

    local_window_blocks: sizes of windows in order; the last one repeats. global_block_indices: global blocks, or with
    global_block_end_indices the begins of ranges of them. num_random_blocks: random columns of each row.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ValueError(f"local_window_blocks={list(local_window_blocks)}: sizes of at least 1 are needed")
        self._ranges = _ranges(global_block_indices, global_block_end_indices)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = local_window_blocks
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self.attention = _direction(attention)
        self.horizontal_global_attention = _horizontal(horizontal_global_attention, attention)

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        layout = _random(self.generator, self.num_random_blocks, blocks, "bidirectional")
        layout |= _windows(self.local_window_blocks, blocks, self.attention)
        return _with_global(layout, self._ranges, self.attention, self.horizontal_global_attention)


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first num_global_blocks for and of all blocks, and random blocks in each row."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = _direction(attention)

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        if blocks < self.num_global_blocks:
            raise ValueError(f"num_global_blocks={self.num_global_blocks} of {blocks} blocks")
        layout = _random(self.generator, self.num_random_blocks, blocks, self.attention)
        layout |= _sliding(self.num_sliding_window_blocks, blocks)
        layout = _with_global(layout, [(0, self.num_global_blocks)], "bidirectional", True)
        return layout.tril() if self.attention == "unidirectional" else layout


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given global blocks or ranges of them, which all blocks read and which read all blocks."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._ranges = _ranges(global_block_indices, global_block_end_indices)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices = global_block_indices
        self.global_block_end_indices = global_block_end_indices
        self.attention = _direction(attention)

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        layout = _with_global(_sliding(self.num_sliding_window_blocks, blocks), self._ranges, "bidirectional", True)
        return layout.tril() if self.attention == "unidirectional" else layout


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window, by default of earlier blocks only."""

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = _direction(attention)

    def _of_head(self, head: int, blocks: int) -> torch.Tensor:
        layout = _sliding(self.num_sliding_window_blocks, blocks)
        return layout.tril() if self.attention == "unidirectional" else layout


def _direction(attention: str) -> str:
    if attention not in DIRECTIONS:
        raise NotImplementedError(f"attention={attention!r}: valid values are {', '.join(map(repr, DIRECTIONS))}")
    return attention


def _horizontal(horizontal: bool, attention: str) -> bool:
    if horizontal and attention != "bidirectional":
        raise ValueError(f"horizontal_global_attention=True with attention={attention!r}: it needs 'bidirectional'")
    return horizontal


def _ranges(begins: Sequence[int], ends: Sequence[int] | None) -> list[tuple[int, int]]:
    if ends is None:
        ends = [begin + 1 for begin in begins]
    if len(begins) != len(ends):
        raise ValueError(f"{len(begins)} global_block_indices and {len(ends)} global_block_end_indices")
    for begin, end in zip(begins, ends, strict=True):
        if begin >= end:
            raise ValueError(f"global blocks from {begin} to {end}: the end is behind the begin")
    return list(zip(begins, ends, strict=True))


def _positions(blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    position = torch.arange(blocks)
    return position[:, None], position[None]


def _windows(sizes: Sequence[int], blocks: int, attention: str) -> torch.Tensor:
    """Return blocks that share a window. The last size repeats."""
    row, column = _positions(blocks)
    bounds = torch.tensor(sizes).cumsum(0)
    over = (torch.arange(blocks) - bounds[-1]).clamp(min=0) // sizes[-1]
    window = torch.bucketize(torch.arange(blocks), bounds, right=True) + over
    layout = window[row] == window[column]
    return (layout & (column <= row) if attention == "unidirectional" else layout).long()


def _sliding(width: int, blocks: int) -> torch.Tensor:
    if blocks < width:
        raise ValueError(f"num_sliding_window_blocks={width} of {blocks} blocks")
    row, column = _positions(blocks)
    return ((row - column).abs() <= width // 2).long()


def _random(generator: random.Random, number: int, blocks: int, attention: str) -> torch.Tensor:
    """Return ``number`` random columns of each row; a unidirectional row takes them from the blocks up to its own."""
    if blocks < number:
        raise ValueError(f"num_random_blocks={number} of {blocks} blocks")
    layout = torch.zeros(blocks, blocks, dtype=torch.int64)
    for row in range(blocks):
        choice = range(blocks if attention == "bidirectional" else row + 1)
        layout[row, generator.sample(choice, min(number, len(choice)))] = 1
    return layout


def _with_global(
    layout: torch.Tensor, ranges: Sequence[tuple[int, int]], attention: str, horizontal: bool
) -> torch.Tensor:
    """Let all blocks read the ranges: later ones only if unidirectional. horizontal: the ranges read all blocks."""
    for begin, end in ranges:
        if begin < len(layout):
            layout[0 if attention == "bidirectional" else begin :, begin:end] = 1
            if horizontal:
                layout[begin:end] = 1
    return layout
