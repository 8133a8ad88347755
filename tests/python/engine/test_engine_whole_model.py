"""Accelerate's requirements for an engine: the whole model's state dict on rank 0, in every stage and tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """A model with tied and frozen parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.register_buffer("scale", torch.full((24,), 0.5))
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(self.frozen(x) * self.scale)


def whole(folder: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    nvme = {"device": "nvme", "nvme_path": folder}
    for zero in ({"stage": 2}, {"stage": 3}, {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}):
        torch.manual_seed(0)
        net = Net()
        names = list(net.state_dict())
        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
        engine, *_ = zcomm.initialize(model=net, config=config)
        engine.backward(engine(torch.arange(4) + comm.rank).square().mean())
        engine.step()
        assert engine.zero_gather_16bit_weights_on_model_save()
        state = engine._zero3_consolidated_16bit_state_dict()
        lean = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert (state is None) == (lean is None) == (comm.rank > 0)
        if state is not None and lean is not None:
            assert sorted(state) == sorted(names)
            assert set(state) - set(lean) == {"frozen.weight", "frozen.bias"}
            fresh = Net()
            fresh.load_state_dict(state)
            found.append([float(fresh(torch.arange(4)).sum()), float(state["head.weight"].sum())])
        engine.destroy()
    return found


def test_rank_0_gets_all_names(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(whole, 2, str(tmp_path))
    assert second == [] and len(first) == 3 and first[1] == first[0] and first[2] == first[0]
