"""Accelerate's loop: a schedule of the program or a dummy one, saving in mid-accumulation; or one process of torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tiny import report, zero

STEPS, ACCUMULATION = 6, 2


def network() -> torch.nn.Module:
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--tier", default="none")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dummy", action="store_true", help="the JSON's optimizer and schedule")
    parser.add_argument("--save", type=int, help="save after this micro-step")
    parser.add_argument("--load", type=int, help="load after this micro-step")
    given = parser.parse_args()

    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = None
    if given.stage is not None:
        more: dict[str, Any] = {}
        if given.dummy:
            more["optimizer"] = {
                "type": "AdamW",
                "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.999], "eps": 1e-8},
            }
            more["scheduler"] = {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": "auto",
                    "warmup_max_lr": "auto",
                    "warmup_num_steps": "auto",
                    "total_num_steps": "auto",
                    "warmup_type": "linear",
                },
            }
        settings = zero(given.stage, given.tier, given.folder, **more) | {"gradient_clipping": 0.0}
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
    accelerator = Accelerator(cpu=plugin is None, gradient_accumulation_steps=ACCUMULATION, deepspeed_plugin=plugin)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))

    def prepared() -> Any:
        model = network()
        loader = DataLoader(TensorDataset(data), batch_size=given.batch)
        if given.dummy and plugin is not None:
            from accelerate.utils import DummyOptim, DummyScheduler

            optimizer: Any = DummyOptim(model.parameters(), lr=0.1, weight_decay=0.0)
            steps = STEPS * accelerator.num_processes
            schedule: Any = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
            if given.dummy:
                factors = [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25]  # WarmupDecayLR: the first two steps are at the minimum
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
            else:
                # Accelerate steps a schedule of the program once per process.
                schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5 ** (1 / accelerator.num_processes))
        return accelerator.prepare(model, optimizer, loader, schedule)

    model, optimizer, loader, schedule = prepared()
    losses, rates = [], []
    for micro, (batch,) in zip(range(STEPS * ACCUMULATION), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if accelerator.sync_gradients:
            rates.append(optimizer.param_groups[0]["lr"])
        if micro == given.save:
            accelerator.save_state(str(given.folder / "state"))
        if micro == given.load:  # saved some steps ago
            accelerator.load_state(str(given.folder / "state"))
    state = accelerator.get_state_dict(model)
    weights = None if state is None else {name: value.flatten().tolist() for name, value in state.items()}
    report(rank=accelerator.process_index, losses=losses, rates=rates, weights=weights)


if __name__ == "__main__":
    main()
