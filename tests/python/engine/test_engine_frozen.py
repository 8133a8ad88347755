"""save_checkpoint(exclude_frozen_parameters=True): only adapters, as Hugging Face's Trainer saves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from zcomm.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zcomm.zero import full_param
from zcomm.zero.checkpoint import read_manifest

Run = Callable[..., list[Any]]


class Adapted(nn.Module):
    """A model with a frozen tied embedding, layer and codes, and a trained low-rank part."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, 8).requires_grad_(False)
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.codes = nn.Parameter(torch.full((4,), seed, dtype=torch.int8), requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.full((8,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.table * 1e-3
        return self.head(self.base(x) + self.up(self.down(x)))


TRAINED = ("down.weight", "up.weight", "up.bias")


def engine_of(seed: int, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    }
    return zcomm.initialize(model=Adapted(seed), config=config)[0]


def train(engine: Any, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(10 * engine.global_steps + zcomm.rank())
        x = torch.randint(0, 16, (2, 5), generator=generator)
        loss = nn.functional.cross_entropy(engine(x).flatten(0, 1), x.flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def save_adapters(folder: str, stage: int) -> Any:
    one = engine_of(1, stage)
    train(one, 2)
    one.save_checkpoint(f"{folder}/whole")
    one.save_checkpoint(f"{folder}/lean", exclude_frozen_parameters=True)
    task = one.save_checkpoint(f"{folder}/beside", exclude_frozen_parameters=True, wait=False)
    task.wait()
    went_on = train(one, 3)
    two = engine_of(1, stage)
    with pytest.raises(ValueError, match=r"not in the checkpoint: .*base\.weight.*strict=False") as told:
        two.load_checkpoint(f"{folder}/lean")
    assert "load_module_strict=False" in str(told.value)
    two.load_checkpoint(f"{folder}/lean", load_module_strict=False)
    assert two.global_steps == 2
    assert train(two, 3) == went_on, "the frozen weights are those of the model, all else is as it was"
    other = engine_of(5, stage)
    base = full_param(other.module.base.weight)
    other.load_checkpoint(f"{folder}/beside", load_module_strict=False)
    assert torch.equal(full_param(other.module.base.weight), base), "what is not there stays"
    assert other.module.table[0] == 1 and other.module.codes[0] == 5
    one.save_16bit_model(f"{folder}/model", exclude_frozen_parameters=True)
    one.save_16bit_model(f"{folder}/model", "beside.safetensors", True, wait=False).wait()
    for each in (one, two, other):
        each.destroy()
    return went_on


@pytest.mark.parametrize("stage", [1, 3])
def test_adapters_are_saved_alone(run_ranks: Run, tmp_path: Path, stage: int) -> None:
    losses = run_ranks(save_adapters, 2, str(tmp_path), stage)
    assert len(set(losses[0])) == 3
    whole, lean, beside = (read_manifest(tmp_path / kind / "global_step2") for kind in ("whole", "lean", "beside"))
    assert set(lean.weights) == {*TRAINED, "table"} and lean.aliases == {}
    assert lean.optimizer == whole.optimizer and beside.weights == lean.weights
    assert whole.frozen is not None and set(whole.frozen) == {"embed.weight", "base.weight", "base.bias", "codes"}
    for folder in ("whole", "lean"):
        state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / folder, "global_step2", True)
        assert state.keys() == {*TRAINED, "table"}
    for name in ("model", "beside"):
        assert load_file(tmp_path / "model" / f"{name}.safetensors").keys() == {*TRAINED, "table"}
    assert {"embed.weight", "base.bias", "codes"} < set(whole.weights)
    assert whole.aliases == {"head.weight": "embed.weight"}
