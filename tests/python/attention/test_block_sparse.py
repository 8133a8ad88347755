"""Attention to a layout's blocks: dense attention with the same scores masked is the oracle, gradients included."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zcomm.attention import layouts
from zcomm.attention.block_sparse import block_sparse_attention, flex_mask
from zcomm.attention.sparse_self_attention import BertSparseSelfAttention, SparseAttentionUtils, SparseSelfAttention

HEADS, BLOCK, BLOCKS, WIDTH = 2, 4, 8, 3
LENGTH = BLOCK * BLOCKS
CONFIGS: list[layouts.SparsityConfig] = [
    layouts.DenseSparsityConfig(HEADS, BLOCK),
    layouts.FixedSparsityConfig(HEADS, BLOCK, True, attention="unidirectional", num_different_global_patterns=2),
    layouts.FixedSparsityConfig(HEADS, BLOCK, num_local_blocks=3, horizontal_global_attention=True),
    layouts.VariableSparsityConfig(HEADS, BLOCK, True, num_random_blocks=2, local_window_blocks=(1, 2)),
    layouts.BigBirdSparsityConfig(HEADS, BLOCK, True),
    layouts.BSLongformerSparsityConfig(HEADS, BLOCK, global_block_indices=(2,)),
    layouts.LocalSlidingWindowSparsityConfig(HEADS, BLOCK),
]


def qkv(batch: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(batch, HEADS, LENGTH, WIDTH, dtype=dtype).requires_grad_() for _ in range(3)]


def dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: torch.Tensor, bias: Any = 0, scale: Any = None
) -> torch.Tensor:
    """Return the same from all scores; queries without a key give 0."""
    size = query.shape[2] // layout.shape[1]
    allowed = layout.bool().repeat_interleave(size, 1).repeat_interleave(size, 2)
    scores = query @ key.transpose(2, 3) * (WIDTH**-0.5 if scale is None else scale) + bias
    scores = scores.masked_fill(~allowed, -torch.inf)
    none = (scores == -torch.inf).all(-1, keepdim=True)
    return (scores.masked_fill(none, 0).softmax(-1) @ value).masked_fill(none, 0)


def agree(out: torch.Tensor, expected: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    found, wanted = (torch.autograd.grad(each, leaves, upstream) for each in (out, expected))
    for mine, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("chunk_nbytes", [1, 2000, 1 << 20])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_equals_dense_attention_and_its_gradients(config: layouts.SparsityConfig, chunk_nbytes: int) -> None:
    layout = config.make_layout(LENGTH)
    leaves = qkv()
    out = block_sparse_attention(*leaves, layout, chunk_nbytes=chunk_nbytes)
    agree(out, dense(*leaves, layout), leaves)


def test_biases_masks_and_a_scale() -> None:
    layout = CONFIGS[5].make_layout(LENGTH)
    for shape in ((1, 1), (2, 1), (1, HEADS), (2, HEADS)):
        leaves = qkv()
        bias = torch.randn(*shape, LENGTH, LENGTH, dtype=torch.float64)
        bias[..., 3:9, :] = -torch.inf  # queries without any key
        bias.requires_grad_()
        key_bias = torch.randn(2, LENGTH, dtype=torch.float64)
        key_bias[1, 5:] = -torch.inf
        out = block_sparse_attention(*leaves, layout, bias=bias, key_bias=key_bias, scale=0.3)
        assert not out[:, :, 3:9].any()
        agree(out, dense(*leaves, layout, bias + key_bias[:, None, None], 0.3), [*leaves, bias])


def test_causal_attention_reads_no_later_key() -> None:
    leaves, layout = qkv(), CONFIGS[5].make_layout(LENGTH)
    later = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
    agree(block_sparse_attention(*leaves, layout, causal=True), dense(*leaves, layout, later), leaves)


@pytest.mark.parametrize("changed", range(1, 5))
def test_a_change_in_place_before_backward_is_torchs_error(changed: int) -> None:
    query, *given = qkv()
    inputs = [query, *(each.detach() for each in given), torch.zeros(1, 1, LENGTH, LENGTH), torch.zeros(2, LENGTH)]
    layout = CONFIGS[5].make_layout(LENGTH)
    out = block_sparse_attention(*inputs[:3], layout, bias=inputs[3], key_bias=inputs[4])
    inputs[changed].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_rows_without_blocks_give_zeros() -> None:
    leaves = qkv()
    layout = torch.eye(BLOCKS, dtype=torch.int64)[None].clone()
    layout[0, 2] = 0
    agree(block_sparse_attention(*leaves, layout), dense(*leaves, layout.expand(HEADS, -1, -1)), leaves)
    assert not block_sparse_attention(*leaves, torch.zeros_like(layout)).any()


def test_flex_attention_takes_the_layout() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    leaves, layout = [each.detach() for each in qkv(dtype=torch.float32)], CONFIGS[1].make_layout(LENGTH)
    for causal in (False, True):
        mask = flex_mask(layout, LENGTH, causal=causal, device="cpu")
        out = flex.flex_attention(*leaves, block_mask=mask)
        torch.testing.assert_close(out, block_sparse_attention(*leaves, layout, causal=causal))
    with pytest.raises(ValueError, match="for 30 tokens"):
        flex_mask(layout, 30)


def test_wrong_arguments_are_named() -> None:
    q, k, v = qkv()
    layout = torch.ones(1, BLOCKS, BLOCKS)
    with pytest.raises(ValueError, match=r"shapes \[\(2, 2, 32, 3\), \(2, 2, 32, 2\)"):
        block_sparse_attention(q, k[..., :2], v, layout)
    with pytest.raises(ValueError, match=r"layout has shape \(3, 8, 8\), not \[2 or 1, n, n\]"):
        block_sparse_attention(q, k, v, layout.expand(3, -1, -1))
    with pytest.raises(ValueError, match="32 tokens in 5 blocks"):
        block_sparse_attention(q, k, v, layout[:, :5, :5])
    with pytest.raises(ValueError, match=r"bias has shape \(32, 32\)"):
        block_sparse_attention(q, k, v, layout, bias=torch.zeros(32, 32))
    with pytest.raises(ValueError, match=r"key_bias has shape \(32,\), not \(2, 32\)"):
        block_sparse_attention(q, k, v, layout, key_bias=torch.zeros(32))


def test_the_module_masks_as_deepspeed() -> None:
    config = layouts.BSLongformerSparsityConfig(HEADS, BLOCK)
    layout = config.make_layout(LENGTH)
    q, k, v = (each.detach() for each in qkv())
    padding = torch.ones(2, LENGTH)
    padding[1, 20:] = 0
    causal = torch.ones(LENGTH, LENGTH).tril()
    added = torch.zeros(2, 1, 1, LENGTH).masked_fill(padding[:, None, None] == 0, -torch.inf)
    rpe = torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64)
    bias = rpe + added + torch.zeros(LENGTH, LENGTH).masked_fill(causal == 0, -torch.inf)
    expected = dense(q, k, v, layout, bias)
    for mode, mask in (("add", added), ("mul", padding)):
        module = SparseSelfAttention(config, key_padding_mask_mode=mode, max_seq_length=2 * LENGTH)
        for keys in (k, k.transpose(2, 3)):
            torch.testing.assert_close(module(q, keys, v, rpe, mask, causal), expected)
    with pytest.raises(ValueError, match="30 tokens"):
        module(q[:, :, :30], k[:, :, :30], v[:, :, :30])
    with pytest.raises(ValueError, match="attn_mask_mode='or'"):
        SparseSelfAttention(config, attn_mask_mode="or")


def test_berts_module() -> None:
    torch.manual_seed(0)
    sizes = SimpleNamespace(hidden_size=8, num_attention_heads=HEADS)
    module = BertSparseSelfAttention(sizes, layouts.DenseSparsityConfig(HEADS, BLOCK))
    x = torch.randn(2, LENGTH, 8)
    q, k, v = (each(x).view(2, LENGTH, HEADS, 4).transpose(1, 2) for each in (module.query, module.key, module.value))
    expected = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, LENGTH, 8)
    torch.testing.assert_close(module(x, None), expected)
    with pytest.raises(ValueError, match="hidden_size=9"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=9, num_attention_heads=2))


def test_layers_get_sparse_attention_with_their_projections() -> None:
    sizes = SimpleNamespace(hidden_size=8, num_attention_heads=HEADS)
    dense_layer = BertSparseSelfAttention(sizes, layouts.DenseSparsityConfig(HEADS, BLOCK))
    layer = SimpleNamespace(attention=SimpleNamespace(self=copy.copy(dense_layer)))
    replace = SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer
    replace(sizes, [layer], layouts.FixedSparsityConfig(HEADS, BLOCK))
    new = layer.attention.self
    assert isinstance(new.sparse_self_attention.sparsity_config, layouts.FixedSparsityConfig)
    assert new.query is dense_layer.query
    foreign = type("BertSelfAttention", (nn.Module,), {"__module__": "transformers.models.bert"})()
    with pytest.raises(ValueError, match="BertSelfAttention of transformers returns a tuple"):
        replace(sizes, [SimpleNamespace(attention=SimpleNamespace(self=foreign))], CONFIGS[0])


def test_padding_to_whole_blocks() -> None:
    ids, mask, embed = torch.arange(10).view(2, 5) + 1, torch.ones(2, 5), nn.Embedding(20, 3)
    pad, unpad = SparseAttentionUtils.pad_to_block_size, SparseAttentionUtils.unpad_sequence_output
    added, new_ids, new_mask, types, positions, embeds = pad(4, ids, mask, None, ids, embed(ids), 0, embed)
    assert (added, types) == (3, None)
    assert new_ids.tolist()[0] == positions.tolist()[0] == [1, 2, 3, 4, 5, 0, 0, 0]
    assert new_mask.tolist()[0] == [1, 1, 1, 1, 1, 0, 0, 0]
    assert torch.equal(embeds, embed(new_ids))
    assert torch.equal(unpad(added, embeds), embed(ids))
    assert pad(5, ids, mask, None, None, None, 0, embed)[0] == 0
    assert torch.equal(unpad(0, embeds), embeds)


def test_positions_of_longer_sequences() -> None:
    for name, reserved in (("bert", 0), ("roberta", 2)):
        embedding = nn.Embedding(4 + reserved, 2)
        old = embedding.weight.detach().clone()
        inner = SimpleNamespace(embeddings=SimpleNamespace(position_embeddings=embedding))
        model = SimpleNamespace(config=SimpleNamespace(), **{name: inner})
        SparseAttentionUtils.extend_position_embedding(model, 10)
        learned = old[reserved:]
        assert torch.equal(embedding.weight, torch.cat([old[:reserved], learned, learned, learned[:2]]))
        assert model.config.max_position_embeddings == embedding.num_embeddings == 10 + reserved
        with pytest.raises(ValueError, match="max_position=10: the model has 10 positions already"):
            SparseAttentionUtils.extend_position_embedding(model, 10)
