"""Two optimizers over one model: each steps, saves, loads and counts only its own parameters, of any configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zcomm
from zcomm.zero import full_param
from zcomm.zero.checkpoint import read_manifest

Run = Callable[..., list[Any]]
BF16, FP32 = torch.bfloat16, torch.float32
PLACES = [  # stage, precision: for the body, then the head
    ((3, "bf16"), (1, "fp32")),
    ((1, "bf16"), (3, "fp32")),
    ((3, "fp32"), (2, "fp32")),
    ((0, "bf16"), (2, "bf16")),
]


class Net(nn.Module):
    def __init__(self, body: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        self.dtypes = (body, head)
        self.body = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for blocks, dtype in zip((self.body, self.head), self.dtypes, strict=True):
            x = x.to(dtype)
            for block in blocks:
                x = x + torch.tanh(block(x))
        return x


class Both:
    """The model and its two optimizers, both of which know the whole model."""

    def __init__(self, of_body: tuple[int, str], of_head: tuple[int, str]) -> None:
        zcomm.init(timeout=60)
        torch.manual_seed(3)
        dtypes = {"fp32": FP32, "bf16": BF16}
        self.model = Net(dtypes[of_body[1]], dtypes[of_head[1]])
        self.opts = []
        for part, (stage, precision) in ((self.model.body, of_body), (self.model.head, of_head)):
            given = torch.optim.AdamW(part.parameters(), lr=0.02)
            how = {"stage": stage, "precision": precision, "share_parameters": False}
            self.opts.append(zcomm.ZeroOptimizer(self.model, given, **how))

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(10 * step + zcomm.rank())
            self.model(torch.randn(2, 12, generator=generator)).float().square().mean().backward()
            for opt in self.opts:
                opt.step()
                opt.zero_grad()

    def values(self) -> dict[str, list[float]]:
        return {name: full_param(param).tolist() for name, param in self.model.named_parameters()}

    def close(self) -> None:
        for opt in self.opts:
            opt.close()


def save_and_resume(folder: str, places: list[Any]) -> list[Any]:
    found = []
    for number, place in enumerate(places):
        both = Both(*place)
        both.train(range(2))
        where = [Path(folder) / f"{number}-{part}" for part in ("body", "head")]
        for opt, path in zip(both.opts, where, strict=True):
            opt.save(path)
        saved = both.values()
        both.train(range(2, 4))
        ended = both.values()
        for opt, path in zip(both.opts, where, strict=True):
            opt.load(path)
        loaded = both.values()
        both.train(range(2, 4))
        whole = [sorted(opt.full_state_dict()) for opt in both.opts]
        counted = sum(opt.memory()["device"]["parameters"] for opt in both.opts)
        found.append((saved, ended, loaded, both.values(), whole, counted))
        both.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_saves_and_loads_its_own(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    names = [name for name, _ in Net(FP32, FP32).named_parameters()]
    own = [{name for name in names if name.startswith(part)} for part in ("body", "head")]
    for of_rank in run_ranks(save_and_resume, world_size, str(tmp_path), PLACES):
        for number, (saved, ended, loaded, again, whole, _) in enumerate(of_rank):
            where = f"{PLACES[number]}"
            assert all(saved[name] != ended[name] for name in names), f"{where}: both step"
            assert loaded == saved and again == ended, where
            assert [set(each) for each in whole] == [each | {"count"} for each in own], f"{where}: the buffer is both's"
    for number in range(len(PLACES)):
        for part, expected in zip(("body", "head"), own, strict=True):
            folder = tmp_path / f"{number}-{part}"
            manifest = read_manifest(folder)
            assert set(manifest.weights) == expected | {"count"}
            for name, entry in manifest.weights.items():
                with safe_open(folder / entry.file, "pt") as file:
                    assert file.get_tensor(name).numel() == (3 if name == "count" else 12 ** (1 + ("weight" in name)))


def test_bytes_are_counted_once() -> None:
    both = Both((1, "bf16"), (2, "fp32"))
    count = {part: sum(p.numel() for p in getattr(both.model, part).parameters()) for part in ("body", "head")}
    body, head = (opt.memory()["device"]["parameters"] for opt in both.opts)
    assert 2 * count["body"] <= body < 2 * count["body"] + 4096, "and padding"
    assert 4 * count["head"] <= head < 4 * count["head"] + 4096
    assert both.model.body[0].weight.dtype == BF16 and both.model.head[0].weight.dtype == FP32
    both.close()
    zcomm.shutdown()


def export_while_both_are_open(folder: str) -> list[str]:
    """Export both: an engine's files hold only its optimizer's parameters; others are left out, not written empty."""
    zcomm.init(timeout=60)
    model = Net(FP32, FP32)
    of_body, of_head = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.body, model.head))
    other = zcomm.ZeroOptimizer(model, of_body, stage=3, share_parameters=False)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    engine, *_ = zcomm.initialize(model=model, optimizer=of_head, config=config)
    engine.save_16bit_model(folder, "head.safetensors")
    whole = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()
    other.close()
    with safe_open(f"{folder}/head.safetensors", "pt") as file:
        assert whole is None or sorted(file.keys()) == sorted(whole)
        return sorted(file.keys())


def test_an_export_leaves_out_what_another_has(run_ranks: Run, tmp_path: Path) -> None:
    names = ["count", *(f"head.{i}.{kind}" for i in range(2) for kind in ("bias", "weight"))]
    assert run_ranks(export_while_both_are_open, 2, str(tmp_path)) == [names, names]
