"""Evoformer's attention in chunks: torch's dense attention and its gradients are the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zcomm.attention.evoformer import CHUNK_NBYTES, DS4Sci_EvoformerAttention, evoformer_attention

SHAPE = (2, 3, 5, 2, 4)  # B, N, L, H, D


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return query, key, value, row bias with masked keys, and pair bias; gradients are required."""
    generator = torch.Generator().manual_seed(sum(shape))
    b, n, length, heads, _ = shape
    shapes = [shape, shape, shape, (b, n, 1, 1, length), (b, 1, heads, length, length)]
    found = [torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes]
    found[3][..., -1] = -1e9
    return [each.to(dtype).requires_grad_() for each in found]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
    """Return the same with all scores in memory."""
    q, k, v = (each.transpose(-2, -3) for each in (query, key, value))
    scores = q @ k.transpose(-1, -2) / query.shape[-1] ** 0.5
    for bias in biases:
        if bias is not None:
            scores = scores + bias
    return (scores.softmax(-1) @ v).transpose(-2, -3)


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the gradients of leaves for a fixed gradient of the output."""
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("chunk_nbytes", [1, 900, 3000, CHUNK_NBYTES])  # one query, some queries, some rows, all
@pytest.mark.parametrize("biases", [(), (3,), (4,), (3, 4)])
def test_equals_dense_attention_and_its_gradients(biases: tuple[int, ...], chunk_nbytes: int) -> None:
    leaves = inputs(SHAPE)
    row_bias, pair_bias = (leaves[at] if at in biases else None for at in (3, 4))
    given = [*leaves[:3], *(leaves[at] for at in biases)]
    out = evoformer_attention(*leaves[:3], row_bias, pair_bias, chunk_nbytes=chunk_nbytes)
    expected = dense(*leaves[:3], row_bias, pair_bias)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients(out, given), gradients(expected, given), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_leading_dimensions_without_biases() -> None:
    query, key, value = (torch.randn(2, 2, 2, 3, 5, 2, 4, dtype=torch.float64) for _ in range(3))
    for cut in (slice(None), (0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)):
        q, k, v = query[cut], key[cut], value[cut]
        torch.testing.assert_close(evoformer_attention(q, k, v, chunk_nbytes=500), dense(q, k, v))


def test_only_a_bias_needs_its_gradient() -> None:
    leaves = inputs(SHAPE)
    fixed = [each.detach() for each in leaves[:4]]
    (found,) = gradients(evoformer_attention(*fixed, leaves[4], chunk_nbytes=900), [leaves[4]])
    (expected,) = gradients(dense(*fixed, leaves[4]), [leaves[4]])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_bf16_sums_gradients_of_biases_in_fp32() -> None:
    shape = (1, 64, 16, 2, 8)
    leaves = inputs(shape, torch.bfloat16)
    wide = [each.detach().double().requires_grad_() for each in leaves]
    found = gradients(evoformer_attention(*leaves, chunk_nbytes=1), leaves)
    expected = gradients(dense(*wide), wide)
    assert [each.dtype for each in found] == [torch.bfloat16] * 5
    for name, mine, exact in zip(("query", "key", "value", "row bias", "pair bias"), found, expected, strict=True):
        error = (mine.double() - exact).norm() / exact.norm()
        assert error < 0.01, f"gradient of {name}: relative error {error:.4f}"


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operation returned."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, torch.Tensor) and each._base is None:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.itemsize)
        return out


def test_memory_is_bounded_by_the_chunk() -> None:
    leaves = inputs((1, 16, 32, 4, 2), torch.float32)
    scores = 16 * 4 * 32 * 32
    with Largest() as chunked:
        gradients(evoformer_attention(*leaves, chunk_nbytes=4 * 4 * scores // 8), leaves)
    with Largest() as whole:
        gradients(dense(*leaves), leaves)
    assert whole.numel == scores
    assert chunked.numel <= scores // 8


def test_deepspeeds_call() -> None:
    leaves = inputs(SHAPE)
    for biases in ([], [leaves[3]], [None, leaves[4]], leaves[3:]):
        out = DS4Sci_EvoformerAttention(*leaves[:3], biases)
        torch.testing.assert_close(out, dense(*leaves[:3], *biases))
    with pytest.raises(ValueError, match="3 biases"):
        DS4Sci_EvoformerAttention(*leaves[:3], [None, None, None])


def test_wrong_arguments_are_named() -> None:
    q, k, v, row_bias, pair_bias = inputs(SHAPE)
    with pytest.raises(ValueError, match=r"shapes \[\(2, 3, 5, 2, 4\), \(2, 3, 5, 2, 3\)"):
        evoformer_attention(q, k[..., :3], v)
    with pytest.raises(ValueError, match=r"types \['torch.float32', 'torch.float64'\]"):
        evoformer_attention(q, k.float(), v)
    with pytest.raises(ValueError, match=r"row_bias has shape \(2, 3, 1, 1, 4\), not \(2, 3, 1, 1, 5\)"):
        evoformer_attention(q, k, v, row_bias[..., :4])
    with pytest.raises(ValueError, match=r"pair_bias has shape \(2, 2, 5, 5\), not \(2, 1, 2, 5, 5\)"):
        evoformer_attention(q, k, v, None, pair_bias[:, 0])
    with pytest.raises(ValueError, match="pair_bias with a query of 4 dimensions"):
        evoformer_attention(q[0], k[0], v[0], None, pair_bias)
    with pytest.raises(ValueError, match="chunk_nbytes=0"):
        evoformer_attention(q, k, v, chunk_nbytes=0)


def test_second_derivatives_are_refused() -> None:
    leaves = inputs(SHAPE)
    grad, *_ = torch.autograd.grad(evoformer_attention(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
