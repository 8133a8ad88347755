"""One rank of a run that saves, or loads, a universal checkpoint: save|load FOLDER STAGE fp32|bf16 TORCH_ADAM.

The same program for DeepSpeed and for zcomm's ``import deepspeed``, for test_universal. Three steps, a checkpoint with
tag "three", its universal form "three_universal", three steps more; "load" makes the last three only. Rank 0 writes the
ranks' losses of these to FOLDER/losses-MODE.json.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.ds_to_universal import main as convert
from torch import nn


class Net(nn.Module):
    """A model with tied parameters and sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 7)
        self.body = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(self.embed(x))))


def engine_of(mode: str, stage: int, precision: str, torch_adam: bool) -> Any:
    torch.manual_seed(3 if mode == "save" else 4)
    model = Net()
    trained = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    if stage == 3:  # DeepSpeed loads the first group's options for all there, and one count of steps as one tensor
        groups = [{"params": trained, "weight_decay": 0.1}]
    params: dict[str, Any] = {"lr": 0.02, "betas": [0.9, 0.95]} | ({"torch_adam": True} if torch_adam else {})
    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": precision == "bf16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"load_universal": mode == "load"},
    }
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
        x = torch.randint(0, 19, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(x).float(), x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(mode: str, folder: str, stage: int, precision: str, torch_adam: bool) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    engine = engine_of(mode, stage, precision, torch_adam)
    if mode == "save":
        train(engine, range(3))
        state = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.4}, "iteration": 3, "epoch": 2}
        engine.save_checkpoint(folder, tag="three", client_state=state)
        if os.environ["RANK"] == "0":
            convert(
                Namespace(
                    input_folder=f"{folder}/three",
                    output_folder=f"{folder}/three_universal",
                    num_extract_workers=1,
                    num_merge_workers=1,
                    keep_temp_folder=False,
                    strict=True,
                    inject_missing_state=False,
                    torch_adam=torch_adam,
                )
            )
    else:
        _, state = engine.load_checkpoint(folder, tag="three_universal")
        assert state["epoch"] == 2 and engine.global_steps == 3, state
    losses = [None, None]
    torch.distributed.all_gather_object(losses, train(engine, range(3, 6)))
    if os.environ["RANK"] == "0":
        with open(f"{folder}/losses-{mode}.json", "w", encoding="utf-8") as file:
            json.dump(losses, file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5] == "1")
