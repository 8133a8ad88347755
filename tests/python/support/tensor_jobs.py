"""A small model for tensor parallelism, with its plan and its losses."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

VOCABULARY, WIDTH, INNER = 12, 7, 20
PLAN = {
    "embed": "embedding_rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "head": "colwise_gather_output",
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    def __init__(self, seed: int, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def batch(number: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(100 + number)
    return tuple(torch.randint(VOCABULARY, (rows, 5), generator=made) for _ in range(2))  # type: ignore[return-value]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    tokens, wanted = batch(number)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
