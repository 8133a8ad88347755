"""One rank of a DeepSpeed run that saves a ZeRO checkpoint, for test_from_deepspeed: FOLDER STAGE fp32|bf16.

Runs in a Python with DeepSpeed; rank 0 also saves DeepSpeed's values of masters and state in FOLDER/expected.pt.
"""

from __future__ import annotations

import os
import sys

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn


class Net(nn.Module):
    """A model with tied and frozen parameters and a buffer, of sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 7)
        self.body = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("seen", torch.arange(4))
        self.scale = nn.Parameter(torch.full((7,), 0.5), requires_grad=False)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))) * self.scale)


def main(folder: str, stage: int, precision: str) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0, "lr": 0.01},
    ]
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
        x = torch.randint(0, 19, (4,), generator=generator)
        engine.backward(nn.functional.cross_entropy(engine(x).float(), x))
        engine.step()
    engine.save_checkpoint(folder, tag="three", client_state={"epoch": 2})
    expected = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            expected[f"master/{name}"] = safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq") if stage == 3 else ():  # stages 1, 2 return it only after a load
                expected[f"{key}/{name}"] = safe_get_full_optimizer_state(param, key).clone()
    if os.environ["RANK"] == "0":
        torch.save(expected, f"{folder}/expected.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
