"""A decoder of Llama's architecture in plain torch; names and shapes of its weights are Hugging Face's.

The large sizes of the demo and benches train it.

RMSNorm before each part, rotary positions (halves turned, as in Hugging Face's files), grouped queries, SwiGLU.
Sources: Touvron et al. 2302.13971; Su et al. 2104.09864; Ainslie et al. 2305.13245; Shazeer 2002.05202.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration with Hugging Face's names, so that a config.json can be read unchanged."""

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False

    @staticmethod
    def load(folder: Path) -> LlamaConfig:
        """Read config.json. Raises: ValueError for an architecture that this file does not compute."""
        text = json.loads((folder / "config.json").read_text())
        if text.get("model_type") != "llama":
            raise ValueError(f"{folder}/config.json: model_type is {text.get('model_type')!r}, not 'llama'")
        scaling = text.get("rope_scaling") or {}
        if scaling.get("rope_type", scaling.get("type", "default")) != "default" or text.get("attention_bias"):
            raise ValueError(f"{folder}/config.json: scaled positions and biases need --code transformers")
        theta = (text.get("rope_parameters") or {}).get("rope_theta")  # in transformers 5
        known = {field.name: text[field.name] for field in fields(LlamaConfig) if field.name in text}
        if text.get("num_key_value_heads") is None:
            known["num_key_value_heads"] = text["num_attention_heads"]
        return LlamaConfig(**known | ({"rope_theta": theta} if theta else {}))

    def numel(self) -> int:
        """Return the number of parameters."""
        width, kv_width = self.hidden_size, self.hidden_size // self.num_attention_heads * self.num_key_value_heads
        block = 2 * width * (width + kv_width) + 3 * width * self.intermediate_size + 2 * width
        words = self.vocab_size * width * (1 if self.tie_word_embeddings else 2)
        return words + self.num_hidden_layers * block + width

    def flops_per_token(self, context: int) -> float:
        """Return the FLOP of forward and backward per token, nothing recomputed.

        They are 6 per weight that multiplies, and 12 x layers x width x context for attention (PaLM, arXiv:2204.02311,
        appendix B).
        """
        lookup = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return 6.0 * (self.numel() - lookup) + 12.0 * self.num_hidden_layers * self.hidden_size * context


PRESETS = {
    # bytes are its words
    "tiny": LlamaConfig(256, 64, 172, 2, 4, 2),
    "1b": LlamaConfig(32000, 2048, 5632, 22, 32, 4),  # TinyLlama: 1.10 billion
    "3b": LlamaConfig(32000, 3200, 8640, 26, 32, 32),  # OpenLLaMA: 3.43
    "7b": LlamaConfig(),  # Llama 2: 6.74
}


class Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


Attend = Callable[..., Tensor]  # as torch's scaled_dot_product_attention


class Attention(nn.Module):
    """Causal attention of as many heads as the projections have columns for. attend: of query, key and value."""

    def __init__(self, c: LlamaConfig, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        width, self.head_width = c.hidden_size, c.hidden_size // c.num_attention_heads
        self.attend = attend
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, c.num_key_value_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, c.num_key_value_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q = self.q_proj(x).view(batch, time, -1, self.head_width).transpose(1, 2)
        k = self.k_proj(x).view(batch, time, -1, self.head_width).transpose(1, 2)
        v = self.v_proj(x).view(batch, time, -1, self.head_width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if k.shape[1] != q.shape[1]:
            k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        y = self.attend(q, k, v, is_causal=True)
        return cast(Tensor, self.o_proj(y.transpose(1, 2).reshape(batch, time, -1)))


class Mlp(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, attend)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    def __init__(self, c: LlamaConfig, attend: Attend = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c, attend) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)


class Llama(nn.Module):
    """Tokens [batch, time] int64 -> logits [batch, time, vocab]. ``recompute``: free activations inside blocks.

    first: position of the first token. attend: the attention, torch's or one of parts of the tokens.
    """

    def __init__(
        self, config: LlamaConfig, recompute: bool = False, attend: Attend = F.scaled_dot_product_attention
    ) -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.model = Decoder(config, attend)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(_start)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def tables(self, x: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions of x [batch, time, width]."""
        c = self.config
        return positions(x.shape[1], c.hidden_size // c.num_attention_heads, c.rope_theta, x, first)

    def forward(self, input_ids: Tensor, first: int = 0) -> Tensor:
        x = self.model.embed_tokens(input_ids)
        cos, sin = self.tables(x, first)
        for block in self.model.layers:
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False)
            else:
                x = block(x, cos, sin)
        return cast(Tensor, self.lm_head(self.model.norm(x)))


def _start(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)


def positions(time: int, width: int, theta: float, like: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [time, width] of position x frequency, each frequency twice. first: position."""
    frequency = theta ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angle = torch.arange(first, first + time, device=like.device, dtype=torch.float32)[:, None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + width / 2)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy in nats per token; tokens: [batch, time + 1]."""
    found = model(tokens[:, :-1])
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
