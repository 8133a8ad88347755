"""Attention to the blocks of a layout, by gathered blocks: O(S * w) time, and one chunk of gathered blocks in memory.

Rows of blocks with equally many blocks of keys run together, as a batch of torch's scaled_dot_product_attention.
With gradients each chunk is a checkpoint: backward gathers its blocks again. Works on any device; on CUDA,
``flex_mask`` gives torch's compiled flex_attention the same layout.
Invariant: equal to dense attention with the scores outside of the layout at -inf.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

CHUNK_NBYTES = 64 << 20


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    key_bias: torch.Tensor | None = None,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> torch.Tensor:
    """Return softmax(scale * query key^T + bias + key_bias, over the layout's blocks) value, [B, H, S, D].

    query, key, value: [B, H, S, D]. layout: [H, n, n] or [1, n, n] (all heads), nonzero if a block of S / n queries
    reads a block of keys. scale: 1 / sqrt(D) if None. causal: a query reads no later key.
    bias: added to scores, [1 or B, 1 or H, S, S]; -inf masks. key_bias: added to the scores of a key, [B, S].
    A query without any key to read gets zeros. chunk_nbytes: bytes of gathered keys and values at a time.
    Raises: ValueError for shapes that do not fit.
    """
    size = _check(query, key, value, layout, bias, key_bias, chunk_nbytes)
    gathered = _Blocks(query, size, layout.expand(query.shape[1], -1, -1), causal, chunk_nbytes)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = torch.zeros_like(gathered.cut(query))
    leaves = [query, key, value, bias, key_bias]
    track = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in leaves)
    parts, places = [], []
    for heads, rows, columns in gathered.chunks():
        arguments = (gathered, query, key, value, bias, key_bias, heads, rows, columns, scale)
        part = (
            checkpoint(_chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
            if track
            else _chunk(*arguments)
        )
        parts.append(part)
        places.append(heads * out.shape[2] + rows)
    if parts:
        flat = out.flatten(1, 2).index_copy(1, torch.cat(places), torch.cat(parts, 1))
        out = flat.view(out.shape)
    return out.flatten(2, 3)


def flex_mask(layout: torch.Tensor, seq_len: int, *, causal: bool = False, device: str = "cuda") -> BlockMask:
    """Return the layout as a block mask of torch's flex_attention, for sequences of seq_len tokens.

    layout: [H, n, n] as above; n divides seq_len. Compile flex_attention to get its speed.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if layout.dim() != 3 or layout.shape[1] != layout.shape[2] or seq_len % max(layout.shape[1], 1):
        raise ValueError(f"layout {tuple(layout.shape)} for {seq_len} tokens: not [H, n, n] with whole blocks")
    size = seq_len // layout.shape[1]
    on_device = layout.to(device).bool()

    def reads(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        found = on_device[h, q // size, k // size]
        return found & (k <= q) if causal else found

    return create_block_mask(reads, None, len(layout), seq_len, seq_len, device=device)


class _Blocks:
    """Rows of blocks that run together, and tensors in blocks."""

    def __init__(self, query: torch.Tensor, size: int, layout: torch.Tensor, causal: bool, nbytes: int) -> None:
        self.size, self.causal = size, causal
        layout = (layout.tril() if causal else layout) != 0
        self._count = layout.sum(-1)  # [H, n]
        self._layout = layout
        per_block = 2 * query.shape[0] * size * query.shape[-1] * query.itemsize
        self._most = max(nbytes // per_block, 1) if per_block else 1
        self._device = query.device

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return [B, H, S, D] as [B, H, n, size, D]."""
        cut: torch.Tensor = whole.unflatten(2, (-1, self.size))
        return cut

    def chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield heads [g], rows of blocks [g], and their columns [g, c]; c is equal in a chunk."""
        for count in self._count.unique().tolist():
            if count == 0:
                continue
            heads, rows = (self._count == count).nonzero(as_tuple=True)
            columns = self._layout[heads, rows].nonzero()[:, 1].view(-1, count)
            step = max(self._most // count, 1)
            for begin in range(0, len(heads), step):
                part = slice(begin, begin + step)
                yield tuple(each[part].to(self._device) for each in (heads, rows, columns))  # type: ignore[misc]


def _chunk(
    blocks: _Blocks,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    heads: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return the outputs of some rows of blocks, [B, g, size, D]."""
    size = blocks.size
    q = blocks.cut(query)[:, heads, rows]
    k, v = (blocks.cut(each)[:, heads[:, None], columns].flatten(2, 3) for each in (key, value))
    tokens = torch.arange(size, device=query.device)
    asked = (rows[:, None] * size + tokens)[:, :, None]  # [g, size, 1]
    read = (columns[:, :, None] * size + tokens).flatten(1)[:, None]  # [g, 1, c * size]
    mask: torch.Tensor | None = None
    if bias is not None:
        head = heads if bias.shape[1] > 1 else torch.zeros_like(heads)
        mask = bias[:, head[:, None, None], asked, read]
    if key_bias is not None:
        keys = key_bias[:, read]
        mask = keys if mask is None else mask + keys
    if blocks.causal:
        later = torch.zeros(read.shape[0], size, read.shape[2], dtype=query.dtype, device=query.device)
        later = later.masked_fill(read > asked, -torch.inf)
        mask = later if mask is None else mask + later
    if mask is None:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
    mask = mask.to(query.dtype).expand(q.shape[0], q.shape[1], size, k.shape[2])
    none = (mask == -torch.inf).all(-1, keepdim=True)  # softmax of such a row is NaN, its gradients, too
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.masked_fill(none, 0), scale=scale)
    return out.masked_fill(none, 0)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: torch.Tensor,
    bias: torch.Tensor | None,
    key_bias: torch.Tensor | None,
    chunk_nbytes: int,
) -> int:
    """Return the tokens of a block."""
    if query.dim() != 4 or not query.shape == key.shape == value.shape:
        shapes = [tuple(each.shape) for each in (query, key, value)]
        raise ValueError(f"query, key and value have shapes {shapes}, not one shape [B, H, S, D]")
    b, heads, length, _ = query.shape
    if layout.dim() != 3 or layout.shape[0] not in (1, heads) or layout.shape[1] != layout.shape[2]:
        raise ValueError(f"layout has shape {tuple(layout.shape)}, not [{heads} or 1, n, n]")
    size, rest = divmod(length, max(layout.shape[1], 1))
    if rest or size == 0:
        raise ValueError(f"{length} tokens in {layout.shape[1]} blocks: not whole ones")
    if bias is not None and (
        bias.dim() != 4
        or bias.shape[0] not in (1, b)
        or bias.shape[1] not in (1, heads)
        or bias.shape[2:] != (length,) * 2
    ):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, not [1 or {b}, 1 or {heads}, {length}, {length}]")
    if key_bias is not None and key_bias.shape != (b, length):
        raise ValueError(f"key_bias has shape {tuple(key_bias.shape)}, not {(b, length)}")
    if chunk_nbytes < 1:
        raise ValueError(f"chunk_nbytes={chunk_nbytes}: not a positive number of bytes")
    return size
