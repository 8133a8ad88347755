"""Losses and cleaned outputs of small compressed models, by the library that ``import deepspeed`` finds.

``python deepspeed_compression.py [FOLDER]``: a folder that is put in front of sys.path. The last line is NUMBERS and
JSON: by case the losses of steps with plain SGD, and a sum of the cleaned model's output.
"""

from __future__ import annotations

import copy
import json
import sys
from typing import Any

sys.path[:0] = sys.argv[1:]

import torch  # noqa: E402
from deepspeed.compression.compress import init_compression, redundancy_clean  # noqa: E402
from deepspeed.compression.config import get_compression_config  # noqa: E402
from deepspeed.compression.scheduler import compression_scheduler  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

WIDTH, HEADS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc, self.out = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        return x + self.out(F.gelu(self.fc(x)))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(11, WIDTH), nn.Sequential(Block(), Block())

    def forward(self, step: int) -> torch.Tensor:
        found: torch.Tensor = self.blocks(self.embed(torch.arange(10).view(2, 5) + step % 2))
        return found


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 3)

    def forward(self, step: int) -> torch.Tensor:
        images = torch.sin(torch.arange(2 * 3 * 8 * 8.0) * (step + 1)).view(2, 3, 8, 8)
        found: torch.Tensor = self.conv2(F.relu(self.conv1(images)))
        return found


def filled(model: nn.Module) -> nn.Module:
    """Set all parameters to numbers that do not depend on a generator; names and order must not matter, either."""
    for param in model.parameters():
        count = param.numel()
        values = torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + count) * 0.2
        param.data.copy_(values.view(param.shape))
    return model


def method(name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> dict[str, Any]:
    group: dict[str, Any] = {"params": params, "modules": modules}
    if related is not None:
        group["related_modules"] = related
    return {
        name: {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"g": group}}
    }


def weights(bits: int, **shared: Any) -> dict[str, Any]:
    params = {"start_bits": bits, "target_bits": bits, "quantization_period": 0}
    return method("weight_quantization", params, ["fc", "q", "embed"], quantize_weight_in_forward=True, **shared)


TOPK = {"method": "topk", "schedule_offset": 2}
RELATED = [[r"\.q$", r"\.k$", r"\.v$"]]
CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "8 bits": (Text, weights(8, quantize_groups=4)),
    "4 bits asymmetric": (Text, weights(4, quantization_type="asymmetric", schedule_offset=2)),
    "ternary": (Text, weights(2, quantize_groups=2)),
    "binary": (Text, weights(1)),
    "inputs": (Text, method("activation_quantization", {"bits": 8}, ["fc", "o$"])),
    "inputs asymmetric": (
        Text,
        method("activation_quantization", {"bits": 4}, ["fc"], quantization_type="asymmetric", schedule_offset=1),
    ),
    "rows l1": (Text, method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [["out"]], method="l1", schedule_offset=1)),
    "rows topk": (Text, method("row_pruning", {"dense_ratio": 0.3}, ["fc"], [["out"]], **TOPK)),
    "heads": (Text, method("head_pruning", {"dense_ratio": 0.5}, [r"\.o$"], RELATED, num_heads=HEADS, **TOPK)),
    "channels": (Images, method("channel_pruning", {"dense_ratio": 0.5}, ["conv1"], [["conv2"]], **TOPK)),
    "inputs of images": (Images, method("activation_quantization", {"bits": 8}, ["conv2"])),
    "all": (
        Text,
        weights(8)
        | method("row_pruning", {"dense_ratio": 0.5}, ["fc"], [["out"]], **TOPK)
        | method("head_pruning", {"dense_ratio": 0.5}, [r"\.o$"], RELATED, num_heads=HEADS, **TOPK)
        | method("activation_quantization", {"bits": 8}, ["out"], schedule_offset=1),
    ),
}


def numbers(kind: type[nn.Module], section: dict[str, Any]) -> list[float]:
    config = {"compression_training": section}
    model = filled(init_compression(filled(kind()), copy.deepcopy(config)))
    schedule = compression_scheduler(model, get_compression_config(copy.deepcopy(config)))
    schedule.step(step_zero_check=True)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), []
    for step in range(5):
        loss = model(step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    redundancy_clean(model, copy.deepcopy(config))
    return [*found, model.eval()(1).square().sum().item()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("NUMBERS " + json.dumps({name: numbers(*case) for name, case in CASES.items()}))
