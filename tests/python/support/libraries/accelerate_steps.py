"""A script: Accelerate's standard prepare(model, optimizer, loader, schedule), with zcomm as its DeepSpeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from as_deepspeed import be_deepspeed

STEPS, ACCUMULATION, OVERFLOW = 6, 2, 2  # optimizer steps, micro-steps of each, the step that overflows in fp16


def network() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def main(folder: str, precision: str, offload: str) -> None:
    be_deepspeed(Path(folder))
    from accelerate import Accelerator, DeepSpeedPlugin

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": offload}},
    }
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x), batch_size=4)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    rates, skipped = [], []
    for micro, (batch,) in zip(range(STEPS * ACCUMULATION), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(batch.to(next(model.parameters()).dtype)).float().square().mean()
            if precision == "fp16" and micro // ACCUMULATION == OVERFLOW:
                loss = loss * float("inf")
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            rates.append(model.get_lr()[0])
            skipped.append(bool(optimizer.step_was_skipped))
    weights = {name: value.flatten().tolist() for name, value in model.optimizer.full_state_dict().items()}
    result = {"rates": rates, "skipped": skipped, "weights": weights, "steps": model.global_steps}
    print("RESULT " + json.dumps(result), flush=True)
    model.destroy()


if __name__ == "__main__":
    main(*sys.argv[1:])
