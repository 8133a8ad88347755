"""Attention of Evoformer blocks: softmax(q k^T / sqrt(D) + row bias + pair bias) v, with one chunk of scores in memory.

Forward calls torch's scaled_dot_product_attention for chunks of rows and queries. Backward computes the scores of a
chunk again, and adds up both biases' gradients. A chunk has all keys of its queries, so that no softmax is merged.
Source: Jumper et al., "Highly accurate protein structure prediction with AlphaFold" (2021), algorithms 7 and 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_NBYTES = 32 << 20
COPIES = 4  # tensors of a chunk's scores that backward has at a time


def evoformer_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_bias: torch.Tensor | None = None,
    pair_bias: torch.Tensor | None = None,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
) -> torch.Tensor:
    """Return softmax(query key^T / sqrt(D) + row_bias + pair_bias) value, of query's shape.

    query, key, value: [..., L, H, D] of one floating-point type: L residues, H heads. With a bias [B, N, L, H, D].
    row_bias: [B, N, 1, 1, L], e.g. -1e9 for masked keys. pair_bias: [B, 1, H, L, L], the same for all N rows.
    Gradients reach all five. Those of biases are summed in fp32 at least. There are no second derivatives.
    chunk_nbytes: bytes of scores in memory at a time, at least those of one query (H * L elements).
    Raises: ValueError for shapes and types that do not fit.
    """
    _check(query, key, value, row_bias, pair_bias, chunk_nbytes)
    shape = query.shape
    if query.dim() != 5:
        query, key, value = (each.reshape(1, -1, *shape[-3:]) for each in (query, key, value))
    out: torch.Tensor = _Attention.apply(query, key, value, row_bias, pair_bias, chunk_nbytes)  # type: ignore[no-untyped-call]
    return out.view(shape)


def DS4Sci_EvoformerAttention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    biases: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """Call evoformer_attention with biases = [row bias, pair bias], both optional. Sizes may be any, also on CPUs."""
    if len(biases) > 2:
        raise ValueError(f"{len(biases)} biases: at most a row bias and a pair bias")
    row_bias, pair_bias = (*biases, None, None)[:2]
    return evoformer_attention(Q, K, V, row_bias, pair_bias)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    row_bias: torch.Tensor | None,
    pair_bias: torch.Tensor | None,
    chunk_nbytes: int,
) -> None:
    shapes = [tuple(each.shape) for each in (query, key, value)]
    if query.dim() < 3 or len(set(shapes)) != 1:
        raise ValueError(f"query, key and value have shapes {shapes}, not one shape [..., L, H, D]")
    types = {each.dtype for each in (query, key, value)}
    if len(types) != 1 or not query.is_floating_point():
        raise ValueError(f"query, key and value have types {sorted(map(str, types))}, not one floating-point type")
    if chunk_nbytes < 1:
        raise ValueError(f"chunk_nbytes={chunk_nbytes}: not a positive number of bytes")
    biases = (("row_bias", row_bias), ("pair_bias", pair_bias))
    if query.dim() != 5:
        given = [name for name, bias in biases if bias is not None]
        if given:
            raise ValueError(f"{given[0]} with a query of {query.dim()} dimensions: a bias needs [B, N, L, H, D]")
        return
    b, n, length, heads, _ = query.shape
    for (name, bias), expected in zip(biases, ((b, n, 1, 1, length), (b, 1, heads, length, length)), strict=True):
        if bias is not None and tuple(bias.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(bias.shape)}, not {expected}")


class _Chunks:
    """Rows and queries with scores in memory at the same time, in fp32 or fp64."""

    def __init__(self, query: torch.Tensor, nbytes: int) -> None:
        self.sizes = query.shape
        _, rows, length, heads, _ = query.shape
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        per_query = COPIES * heads * length * self.dtype.itemsize
        self._rows = min(max(nbytes // max(per_query * length, 1), 1), rows)
        self._queries = length if self._rows > 1 else min(max(nbytes // max(per_query, 1), 1), length)

    def rows(self) -> Iterator[tuple[int, slice]]:
        """Yield an index of B and rows of N."""
        for b in range(self.sizes[0]):
            for begin in range(0, self.sizes[1], max(self._rows, 1)):
                yield b, slice(begin, begin + self._rows)

    def queries(self) -> Iterator[slice]:
        """Yield the queries of a chunk."""
        for begin in range(0, self.sizes[2], max(self._queries, 1)):
            yield slice(begin, begin + self._queries)


def _bias(
    row_bias: torch.Tensor | None, pair_bias: torch.Tensor | None, b: int, rows: slice, queries: slice
) -> torch.Tensor | None:
    """Return the sum of the biases that broadcasts to [rows, H, queries, L]."""
    found = row_bias[b, rows] if row_bias is not None else None
    if pair_bias is not None:
        pairs = pair_bias[b, :, :, queries]
        found = pairs if found is None else found + pairs
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        row_bias: torch.Tensor | None,
        pair_bias: torch.Tensor | None,
        chunk_nbytes: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, row_bias, pair_bias)
        ctx.chunks = chunks = _Chunks(query, chunk_nbytes)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        with torch.autocast(query.device.type, enabled=False):
            for b, rows in chunks.rows():
                q, k, v = (each[b, rows].transpose(1, 2) for each in (query, key, value))
                for queries in chunks.queries():
                    bias = _bias(row_bias, pair_bias, b, rows, queries)
                    mask = None if bias is None else bias.to(q.dtype).expand(*q.shape[:2], -1, -1)
                    part = torch.nn.functional.scaled_dot_product_attention(q[:, :, queries], k, v, mask)
                    out[b, rows, queries] = part.transpose(1, 2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, row_bias, pair_bias = ctx.saved_tensors
        chunks: _Chunks = ctx.chunks
        needed = ctx.needs_input_grad
        scale = query.shape[-1] ** -0.5
        d_query, d_key, d_value = (torch.empty_like(each) for each in (query, key, value))
        d_rows = row_bias.new_zeros(row_bias.shape, dtype=chunks.dtype) if needed[3] else None
        d_pairs = pair_bias.new_zeros(pair_bias.shape, dtype=chunks.dtype) if needed[4] else None
        with torch.autocast(query.device.type, enabled=False):
            for b, rows in chunks.rows():
                q, k, v, g = (each[b, rows].transpose(1, 2).to(chunks.dtype) for each in (query, key, value, grad))
                dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
                for queries in chunks.queries():
                    part, part_grad = q[:, :, queries], g[:, :, queries]
                    scores = (part * scale) @ k.transpose(2, 3)
                    bias = _bias(row_bias, pair_bias, b, rows, queries)
                    weights = torch.softmax(scores if bias is None else scores.add_(bias), -1)
                    dv += weights.transpose(2, 3) @ part_grad
                    slope = part_grad @ v.transpose(2, 3)
                    slope -= (weights * slope).sum(-1, keepdim=True)
                    slope *= weights  # the gradient of the scores
                    dq[:, :, queries] = (slope @ k) * scale
                    dk += (slope.transpose(2, 3) @ part) * scale
                    if d_rows is not None:
                        d_rows[b, rows] += slope.sum((1, 2), keepdim=True)
                    if d_pairs is not None:
                        d_pairs[b, 0, :, queries] += slope.sum(0)
                for whole, of_rows in ((d_query, dq), (d_key, dk), (d_value, dv)):
                    whole[b, rows] = of_rows.transpose(1, 2)
        return (
            d_query,
            d_key,
            d_value,
            None if d_rows is None else d_rows.to(row_bias.dtype),
            None if d_pairs is None else d_pairs.to(pair_bias.dtype),
            None,
        )
