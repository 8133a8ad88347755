"""Models and configurations of the tests of compression."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, INNER, LENGTH = 16, 4, 24, 5


class Block(nn.Module):
    """Attention and an MLP; the number of heads follows from the sizes of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc, self.out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, _ = x.shape
        q, k, v = (
            part(x).view(samples, length, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(samples, length, -1))
        return x + self.out(F.gelu(self.fc(x)))


class Model(nn.Module):
    """Embedding, blocks and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.head(x)
        return found


def model(blocks: int = 2, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(blocks)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(11, (3, LENGTH), generator=torch.Generator().manual_seed(seed))


def method(name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> dict[str, Any]:
    """Return the section of one method with one group."""
    group: dict[str, Any] = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    own = {"enabled": True, "schedule_offset": 0, **shared}
    return {name: {"shared_parameters": own, "different_groups": {"one": group}}}


def config(*methods: dict[str, Any]) -> dict[str, Any]:
    return {"compression_training": {name: section for each in methods for name, section in each.items()}}


def bits(start: int, target: int, modules: list[str], period: int = 1, **shared: Any) -> dict[str, Any]:
    params = {"start_bits": start, "target_bits": target, "quantization_period": period}
    return method("weight_quantization", params, modules, **shared)


def rows(kind: str, **shared: Any) -> dict[str, Any]:
    return method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [["out"]], method=kind, **shared)


def heads(kind: str, **shared: Any) -> dict[str, Any]:
    related = [[r"\.q$", r"\.k$", r"\.v$"]]
    return method("head_pruning", {"dense_ratio": 0.5}, [r"\.o$"], related, method=kind, num_heads=HEADS, **shared)


def everything(kind: str = "topk", offset: int = 0) -> dict[str, Any]:
    """All methods of Linear together."""
    return config(
        bits(6, 4, [r"\.q$", "fc", "embed"], quantize_groups=4, schedule_offset=offset),
        method("activation_quantization", {"bits": 8}, ["fc"], schedule_offset=offset, range_calibration="static"),
        method("sparse_pruning", {"dense_ratio": 0.75}, ["out", "head"], method=kind, schedule_offset=offset),
        rows(kind, schedule_offset=offset),
        heads(kind, schedule_offset=offset),
    )


class Net(nn.Module):
    """Two convolutions with a norm between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.conv2 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, bias=False)
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.conv2(F.relu(self.bn1(self.conv1(x)))).mean((2, 3)))
        return found
