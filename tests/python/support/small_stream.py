"""A small module to stream, its inputs, and a comparison with the resident one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, BLOCKS = 64, 6


class Block(nn.Module):
    """A block with a scale, and a buffer that forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) + self.table.to(x.dtype))


class Net(nn.Module):
    """Tied head, blocks in another order than registered, one of them twice, a weight used outside of its module."""

    def __init__(self, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS, order: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.order = range(blocks) if order is None else order
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.blocks[number](x)
        return F.linear(x, self.embed.weight)


def tokens(seed: int, count: int = 3) -> torch.Tensor:
    return torch.randint(0, 50, (2, count), generator=torch.Generator().manual_seed(seed))


def check_equal(net: nn.Module, want: nn.Module, passes: int = 3) -> None:
    with torch.no_grad():
        for number in range(passes):
            assert torch.equal(net(tokens(number)), want(tokens(number)))
