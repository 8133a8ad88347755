"""Computations in tiles along the tokens, of which backward computes one at a time again: memory of one tile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def tiled(
    function: Callable[..., torch.Tensor], parts: Mapping[str, torch.Tensor], tiles: int, dim: int = 1, **rest: Any
) -> list[tuple[torch.Tensor, int]]:
    """Return ``function``'s results for tiles of ``parts``, each with the tile's size along ``dim``.

    parts: tensors of one size along ``dim``, passed by name; the last tiles are shorter or missing. rest: passed to
    each call. Gradients are exact; backward calls ``function`` again. Raises: ValueError for sizes that differ.
    """
    sizes = {name: part.shape[dim] for name, part in parts.items()}
    if len(set(sizes.values())) != 1 or tiles < 1:
        raise ValueError(f"tiles={tiles} of tensors of sizes {sizes} along dimension {dim}")
    cut = [part.chunk(tiles, dim) for part in parts.values()]

    def one(*tile: torch.Tensor) -> torch.Tensor:
        return function(**dict(zip(parts, tile, strict=True)), **rest)

    found = []
    for tile in zip(*cut, strict=True):
        out: Any = checkpoint(one, *tile, use_reentrant=False)
        found.append((out, tile[0].shape[dim]))
    return found


def reduced(outs: list[tuple[torch.Tensor, int]], reduction: str) -> torch.Tensor:
    """Return the "sum" of tiles' results, or their "mean" weighted by the tiles' sizes. Raises: ValueError."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f'unknown reduction {reduction!r}: valid values are "mean" and "sum"')
    if reduction == "sum":
        return torch.stack([out for out, _ in outs]).sum()
    count = sum(size for _, size in outs)
    return torch.stack([out * (size / count) for out, size in outs]).sum()
