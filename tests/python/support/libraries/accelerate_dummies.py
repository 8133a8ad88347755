"""A script: Accelerate's DummyOptim and DummyScheduler, which stand for sections of the configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate_steps import network
from as_deepspeed import be_deepspeed

STEPS, RATE, DECAY = 5, 0.02, 0.1


def main(folder: str, how: str) -> None:
    """Train. how: "section": the configuration has the schedule, too; "callable": the program passes one; "groups":
    it also passes param groups."""
    be_deepspeed(Path(folder))
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import DummyOptim, DummyScheduler

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2},
    }
    if how == "section":
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        params = dict.fromkeys(names, "auto") | {"warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = network()
    params = list(model.parameters())
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}] if how == "groups" else params
    optimizer = DummyOptim(groups, lr=RATE, weight_decay=DECAY)
    given = {"total_num_steps": 10, "warmup_num_steps": 3}
    if how != "section":
        given = {"lr_scheduler_callable": lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.5)}
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader, DummyScheduler(optimizer, **given)
    )
    rates = []
    for _, (batch,) in zip(range(STEPS), loader, strict=False):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(model.get_lr()[0])
    weights = {name: value.flatten().tolist() for name, value in model.optimizer.full_state_dict().items()}
    print("RESULT " + json.dumps({"rates": rates, "weights": weights}), flush=True)
    model.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
