"""Lightning Fabric's loop with ZcommStrategy, or in one process; saving, loading, accumulation, a schedule."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tiny import report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--tier", default="none")
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()

    from lightning.fabric import Fabric

    strategy: Any = "auto"
    devices = 1
    if given.stage is not None:
        from zcomm.compat.lightning import ZcommStrategy

        more = {} if given.tier == "none" else {"offload": given.tier}
        if given.tier == "nvme":
            more["nvme_path"] = str(given.folder / "swap")
        strategy, devices = ZcommStrategy(given.stage, **more), 2
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=devices)
    fabric.launch()
    torch.manual_seed(4)
    model: Any = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer = fabric.setup(model, optimizer)
    data = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(data), batch_size=given.batch))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    losses, norms, step = [], [], 0
    for micro, (batch,) in enumerate(loader):
        last = micro % 2 == 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(batch).square().mean()
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean").item())
        if last:
            norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.05)))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
        if step == 3 and last:
            fabric.save(given.folder / "fabric", parts | {"step": step})
    final = model(data).square().mean().item()
    state = parts | {"step": 0}
    rest = fabric.load(given.folder / "fabric", state)
    back = model(data).square().mean().item()
    report(
        rank=fabric.global_rank,
        world=fabric.world_size,
        losses=losses,
        norms=norms,
        rate=optimizer.param_groups[0]["lr"],
        final=final,
        back=back,
        step=state["step"],
        rest=sorted(rest),
    )


if __name__ == "__main__":
    main()
