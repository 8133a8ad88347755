"""The demo's models over bytes in plain torch: they have no ranks, shards or tiers. A small GPT, and Llama's decoder.

The GPT has pre-norm blocks, rotary positions, causal attention after short convolutions, and a squared-ReLU MLP: at
this size it learns most per second. Deterministic: the same seed gives the same bits.
Sources: Radford et al. 2019 (GPT-2); Su et al. 2021 (rotary positions); So et al. 2021 (Primer: squared ReLU and
depthwise convolutions of queries, keys and values).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zcomm.demo.llama import Attend, Llama, LlamaConfig

VOCAB = 256


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model. `width` must divide by 2 * `heads`."""

    layers: int = 4
    heads: int = 4
    width: int = 256
    context: int = 128
    seed: int = 1


class Attention(nn.Module):
    """Causal self-attention with rotary positions: [batch, time, width] -> the same. mix: taps of the convolution."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Parameter(torch.empty(3, 3 * width))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = short_convolution(self.qkv(x), self.mix)
        qkv = qkv.view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        qk = rotate(qkv[:2], cos, sin)
        y = F.scaled_dot_product_attention(qk[0], qk[1], qkv[2], is_causal=True)
        return cast(Tensor, self.out(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    """One pre-norm transformer block; stage 3 gathers its parameters together."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return cast(Tensor, x + self.down(F.relu(self.up(self.norm2(x))).square()))


class PlacedBlock(nn.Module):
    """A block that takes the tables of positions by itself. tables: cosines and sines for x [batch, time, width]."""

    def __init__(self, block: nn.Module, tables: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.block, self.tables = block, tables

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.block(x, *self.tables(x)))


class GPT(nn.Module):
    """Bytes [batch, time] int64 -> logits [batch, time, 256]; with targets -> mean loss in nats per byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        cos, sin = rotary_tables(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every weight from the config's seed; a block's output projections start at zero."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                nn.init.ones_(parameter)
            elif name.endswith("mix"):
                nn.init.constant_(parameter, 0.5)
            elif name.endswith(("out.weight", "down.weight", "head.weight")):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.5 / self.config.width**0.5, generator=generator)
        nn.init.normal_(self.embed.weight, std=0.5, generator=generator)

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the positions of x [batch, time, width]."""
        return self.cos[: x.shape[1]].to(x.dtype), self.sin[: x.shape[1]].to(x.dtype)

    def layers(self) -> list[nn.Module]:
        """Return the model as a list of layers, from bytes to logits."""
        return [self.embed, *(PlacedBlock(block, self.tables) for block in self.blocks), self.norm, self.head]

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        time = inputs.shape[1]
        if time > self.config.context:
            raise ValueError(f"{time} bytes are more than the context of {self.config.context}")
        x = self.embed(inputs)
        cos, sin = self.tables(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else loss_of(logits, targets)


class ByteLlama(Llama):
    """Llama's decoder with the calls of GPT. Backward recomputes each block, so only block inputs are saved.

    attend: torch's attention, or one of parts of the tokens. part: the tokens of its inputs; may change.
    """

    def __init__(self, layers: int, heads: int, width: int, attend: Attend = F.scaled_dot_product_attention) -> None:
        inner = -(-width * 11 // 4 // 64) * 64  # Llama's 8/3 of the width or a little more, in whole cache lines
        key_heads = heads // 8 or heads
        super().__init__(LlamaConfig(VOCAB, width, inner, layers, heads, key_heads), recompute=True, attend=attend)
        self.part = slice(0, None)

    def layers(self) -> list[nn.Module]:
        """Return the model as a list of layers, from bytes to logits."""
        blocks = [PlacedBlock(block, lambda x: self.tables(x, self.part.start)) for block in self.model.layers]
        return [self.model.embed_tokens, *blocks, self.model.norm, self.lm_head]

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
        logits = super().forward(inputs, self.part.start)
        return logits if targets is None else loss_of(logits, targets)


def make_model(
    model: str, layers: int, heads: int, width: int, context: int, seed: int = 1, **options: Attend
) -> nn.Module:
    """Build the model of a run, "gpt" or "llama": bytes -> logits, with targets -> mean loss in nats per byte.

    options: of ByteLlama.
    """
    if model == "llama":
        return ByteLlama(layers, heads, width, **options)
    return GPT(ModelConfig(layers, heads, width, context, seed))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats per byte. logits: [batch, time, 256]; targets: [batch, time]."""
    return F.cross_entropy(logits.view(-1, VOCAB).float(), targets.reshape(-1))


def rotary_tables(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [context, head_width / 2] of position * frequency."""
    frequency = 1000.0 ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.arange(context, dtype=torch.float32)[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of the last dimension by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve causally by channel: x [batch, time, width], weight [taps, width]; tap k looks k positions back."""
    y = x * weight[0]
    for k in range(1, weight.shape[0]):
        y = y + F.pad(x[:, :-k] * weight[k], (0, 0, k, 0))
    return y
