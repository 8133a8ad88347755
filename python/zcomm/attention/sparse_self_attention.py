"""Modules of sparse self-attention with DeepSpeed's names: a layout, masks, BERT's projections, padding to blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zcomm.attention.block_sparse import block_sparse_attention
from zcomm.attention.layouts import FixedSparsityConfig, SparsityConfig


class SparseSelfAttention(nn.Module):
    """Self-attention to the blocks of ``sparsity_config``'s layout, in any floating-point type, on any device.

    key_padding_mask_mode, attn_mask_mode: "add" adds a mask to the scores, "mul" masks its zeros. max_seq_length:
    the layout is made once, for so many tokens, and saved with the model. Shorter sequences use its upper left part.
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f'{name}={mode!r}: valid values are "add" and "mul"')
        self.sparsity_config = sparsity_config
        self.register_buffer("master_layout", sparsity_config.make_layout(max_seq_length))
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode

    def get_layout(self, L: int) -> torch.Tensor:
        """Return the layout for L tokens, [heads, n, n], on the CPU. Raises: ValueError."""
        layout: torch.Tensor = self.master_layout  # type: ignore[assignment]
        block = self.sparsity_config.block
        if L % block or layout.shape[1] * block < L:
            raise ValueError(f"{L} tokens: not whole blocks of {block}, or more than {layout.shape[1] * block} tokens")
        return layout[:, : L // block, : L // block].cpu()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rpe: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        attn_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return attention of query, key, value [B, H, S, D] (key may be [B, H, D, S]), of the same shape.

        rpe: added to the scores, [1 or B, 1 or H, S, S]. key_padding_mask: [B, S], or [B, 1, 1, S]. attn_mask: [S, S].
        """
        batch, _, length, _ = query.shape
        if key.shape[2] != length:
            key = key.transpose(2, 3)
        bias = rpe
        if attn_mask is not None:
            mask = _added(attn_mask.reshape(length, length), self.attn_mask_mode, query.dtype)[None, None]
            bias = mask if bias is None else bias + mask
        keys = None
        if key_padding_mask is not None:
            keys = _added(key_padding_mask.reshape(batch, length), self.key_padding_mask_mode, query.dtype)
        return block_sparse_attention(query, key, value, self.get_layout(length), bias=bias, key_bias=keys)


def _added(mask: torch.Tensor, mode: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as numbers that are added to scores."""
    if mode == "add":
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask == 0, -torch.inf)


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with a sparse layout. config: hidden_size and num_attention_heads, as transformers'."""

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.hidden_size
        if width % heads:
            raise ValueError(f"hidden_size={width} is not a multiple of num_attention_heads={heads}")
        self.num_attention_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.sparse_self_attention = SparseSelfAttention(sparsity_config or FixedSparsityConfig(num_heads=heads))

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """Return [B, S, width] of hidden_states [B, S, width]. attention_mask: added, [B, 1, 1, S] or [B, S]."""
        query, key, value = (
            project(hidden_states).unflatten(-1, (self.num_attention_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        out: torch.Tensor = self.sparse_self_attention(query, key, value, key_padding_mask=attention_mask)
        return out.transpose(1, 2).flatten(2)


class SparseAttentionUtils:
    """Functions that pad inputs to whole blocks, and lengthen the positions of BERT and RoBERTa."""

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[Any, ...]:
        """Return (number of added tokens, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds).

        All inputs are [B, S] except for inputs_embeds [B, S, width], and None stays None. Added tokens are
        pad_token_id, masked by 0; embeddings of them are model_embeddings'. Call unpad_sequence_output at the end.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("input_ids and inputs_embeds are both None")
        added = -given.shape[1] % block_size

        def padded(ids: torch.Tensor | None, number: int) -> torch.Tensor | None:
            return None if ids is None else nn.functional.pad(ids, (0, added), value=number)

        if inputs_embeds is not None and added:
            pads = torch.full((given.shape[0], added), pad_token_id, dtype=torch.long, device=given.device)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(pads)], 1)
        return (
            added,
            padded(input_ids, pad_token_id),
            padded(attention_mask, 0),
            padded(token_type_ids, 0),
            padded(position_ids, pad_token_id),
            inputs_embeds,
        )

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Return [B, S, width] without the last pad_len tokens."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Repeat the position embeddings of a BERT or RoBERTa model up to max_position positions; return the model.

        Call it before an optimizer takes the parameters: the embedding's weight is a new parameter.
        """
        name, reserved = ("bert", 0) if hasattr(model, "bert") else ("roberta", 2)
        if not hasattr(model, name):
            raise ValueError(f"{type(model).__name__} has neither .bert nor .roberta")
        embedding = getattr(model, name).embeddings.position_embeddings
        learned = embedding.weight.data[reserved:]
        if max_position <= len(learned):
            raise ValueError(f"max_position={max_position}: the model has {len(learned)} positions already")
        times = -(-max_position // len(learned))
        grown = torch.cat([embedding.weight.data[:reserved], learned.repeat(times, 1)[:max_position]])
        embedding.weight = nn.Parameter(grown)
        embedding.num_embeddings = len(grown)
        inner = getattr(model, name).embeddings
        for buffer in ("position_ids", "token_type_ids"):
            if isinstance(getattr(inner, buffer, None), torch.Tensor):
                old = getattr(inner, buffer)
                grown_ids = torch.arange(len(grown)) if buffer == "position_ids" else torch.zeros(len(grown))
                setattr(inner, buffer, grown_ids.to(old)[None])
        model.config.max_position_embeddings = len(grown)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the most tokens that the tokenizer returns; return the tokenizer."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig
    ) -> Any:
        """Replace each layer's ``attention.self`` by BertSparseSelfAttention with the same projections.

        For layers that expect a tensor from it. Raises: ValueError for transformers' layers, which expect a tuple.
        """
        for layer in layers:
            old = layer.attention.self
            if type(old).__module__.startswith("transformers."):
                raise ValueError(
                    f"{type(old).__name__} of transformers returns a tuple: register a function that calls "
                    "zcomm.attention.block_sparse_attention with transformers.AttentionInterface instead"
                )
            new = BertSparseSelfAttention(config, sparsity_config)
            new.query, new.key, new.value = old.query, old.key, old.value
            layer.attention.self = new
        return layers
