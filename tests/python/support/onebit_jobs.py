"""Jobs and a reference in the tests of 1-bit optimizers: ranks are rows of plain torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import zcomm
from zcomm.zero.onebit.signs import part_of

FREEZE = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 7)).to(dtype)


def sample(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 40, generator=generator), torch.randn(6, 7, generator=generator)


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = sample(step, rank)
    return nn.functional.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def zero(model: nn.Module, name: str = "onebit_adam", **options: Any) -> zcomm.ZeroOptimizer:
    options = {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.1, "stage": 0, "bucket_mb": 0.004, **options}
    if name == "onebit_adam":
        options.setdefault("freeze_step", FREEZE)
    return zcomm.ZeroOptimizer(model, name, **options)


def run_steps(opt: zcomm.ZeroOptimizer, model: nn.Module, steps: Sequence[int], rank: int, accum: int = 1) -> None:
    for step in steps:
        for micro in range(accum):
            opt.backward(loss_at(model, accum * step + micro, rank))
            opt.step()
            opt.zero_grad()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


# --- a reference in plain torch ----------------------------------------------------------------------------------


def signs(value: torch.Tensor, error: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoded signs of ``value + error``, and the new error."""
    whole = torch.where(mask, value + error, 0.0)
    scale = (whole.double().square().sum() / max(int(mask.sum()), 1)).sqrt().float().bfloat16().float()
    found = torch.where(mask, torch.where(whole < 0, -scale, scale), 0.0)
    return found, torch.where(mask, whole - found, 0.0)


def average_rows(
    rows: list[torch.Tensor], workers: list[torch.Tensor], server: torch.Tensor, mask: torch.Tensor
) -> Any:
    """Average ``rows``, one for each rank, part by part. workers, server: errors, changed in place."""
    ranks, count, out = len(rows), rows[0].numel(), torch.zeros_like(rows[0])
    for part in (part_of(count, rank, ranks) for rank in range(ranks)):
        if part.start == part.stop:
            continue
        total = torch.zeros(part.stop - part.start)
        for rank in range(ranks):
            found, workers[rank][part] = signs(rows[rank][part], workers[rank][part], mask[part])
            total += found
        out[part], server[part] = signs(total / ranks, server[part], mask[part])
    return out
