"""Checkpoints of a pipeline: each name of the whole model once; they load in any cut, equal to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

import zcomm
from zcomm.zero.checkpoint.export import export
from zcomm.zero.checkpoint.manifest_reader import read_manifest

Run = Callable[..., list[Any]]
WORDS, SAMPLES = 11, 8


class Scale(nn.Module):
    """A layer with a buffer, a frozen parameter and extra state."""

    seen: int

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.factor = nn.Parameter(torch.ones(6), requires_grad=False)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        with torch.no_grad():
            self.mean.add_(x.mean((0, 1)))  # type: ignore[operator]
        return x * self.factor

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "values": torch.full((2,), float(self.seen))}

    def set_extra_state(self, state: Any) -> None:
        self.seen = int(state["seen"])
        assert state["values"][0] == self.seen


def layers(seed: int, extra: bool = True) -> nn.Sequential:
    """Return layers of which the first, the fourth and the last share a weight."""
    torch.manual_seed(seed)
    embedding, middle, head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False), nn.Linear(6, WORDS)
    head.weight = middle.weight = embedding.weight
    scales = [Scale(), Scale()] if extra else [nn.LayerNorm(6), nn.LayerNorm(6)]
    return nn.Sequential(
        embedding, nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), scales[0], middle, nn.Linear(WORDS, 6), scales[1], head
    )


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (2, SAMPLES, 3), generator=torch.Generator().manual_seed(number))
    return words[0], words[1]


class Trained:
    """A pipeline, or with one rank along "pipe" a plain model, and its optimizer. Two param groups."""

    def __init__(self, sizes: Mapping[str, int], seed: int, precision: str, extra: bool = True, **more: Any) -> None:
        self.comm = zcomm.init(timeout=60)
        mesh, self.model = zcomm.ProcessMesh(self.comm, **sizes), layers(seed, extra)
        self.pipe: Any = None
        self.module: nn.Module = self.model
        if mesh.size("pipe") > 1:
            self.pipe = zcomm.parallel.pipeline(self.model, mesh, 4, loss=loss, **more)
            self.module = self.pipe.module
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for name, p in named if p.dim() == 1], "weight_decay": 0.0},
            {"params": [p for name, p in named if p.dim() > 1], "weight_decay": 0.1},
        ]
        torch_rule = torch.optim.AdamW(groups, lr=0.01)
        self.opt = zcomm.ZeroOptimizer(self.module, torch_rule, mesh=mesh, stage=1, precision=precision)

    def step(self, number: int) -> None:
        if self.pipe is None:
            x, y = batch(number)
            for inputs, target in zip(x.chunk(4), y.chunk(4), strict=True):
                (loss(self.model(inputs), target) / 4).backward()
        else:
            self.pipe.step(*batch(number))
        self.opt.step()
        self.opt.zero_grad()

    def values(self) -> dict[str, torch.Tensor]:
        """Return weights and state of the whole model, on all ranks."""
        found: dict[str, Any] = {}
        for root in range(self.comm.world_size):
            flat: dict[str, list[torch.Tensor]] = {}
            for piece in self.opt.iter_state(root=root):
                for key, value in piece.values.items():
                    flat.setdefault(f"{key} of {piece.name}", []).append(value.clone())
            if root == self.comm.rank:
                found = {name: torch.cat(pieces) for name, pieces in flat.items()}
        return found

    def extra(self) -> dict[str, int]:
        return {name: layer.seen for name, layer in self.module.named_children() if isinstance(layer, Scale)}

    def close(self) -> None:
        self.opt.close()
        if self.pipe is not None:
            self.pipe.close()


def saved(folder: str, sizes: dict[str, int], precision: str) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    job = Trained(sizes, 3, precision)
    for number in range(3):
        job.step(number)
    job.opt.save(f"{folder}/first", client_state={"step": 3})
    found, extra = job.values(), job.extra()
    background = job.opt.save(f"{folder}/second", wait=False)
    job.step(3)
    background.wait()
    for name, param in job.module.named_parameters():
        assert zcomm.zero.full_param(param).shape == param.shape, name
    job.close()
    return found, extra


def loaded(
    folder: str, sizes: dict[str, int], precision: str, more: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    job = Trained(sizes, 9, precision, **more)
    assert job.opt.load(f"{folder}/second") is None
    second = job.values()
    assert job.opt.load(f"{folder}/first") == {"step": 3}
    found, extra = job.values(), job.extra()
    assert all(torch.equal(second[name], value) for name, value in found.items())
    with torch.no_grad():
        for param in job.module.parameters():
            param.zero_()
    zcomm.zero.load_weights(job.opt, f"{folder}/first")
    again = job.values()
    assert all(torch.equal(again[name], value) for name, value in found.items() if name.startswith("weight"))
    job.step(3)
    job.close()
    return found, extra


CUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pipe": 1}, {}),
    ({"pipe": 2}, {"cut": "uniform"}),
    ({"pipe": 2}, {"schedule": "interleaved"}),
    ({"data": 1, "pipe": 4}, {"cut": [0, 1, 4, 6, 9]}),
    ({"pipe": 2, "data": 2}, {}),
    ({"data": 2, "pipe": 1}, {}),
]


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_a_checkpoint_of_stages_loads_in_any_cut(run_ranks: Run, tmp_path: Path, precision: str) -> None:
    sizes = {"data": 2, "pipe": 2}
    found = run_ranks(saved, 4, str(tmp_path), sizes, precision)
    wanted = found[0][0]
    extra = {name: seen for _, of_rank in found for name, seen in of_rank.items()}
    whole = layers(0)
    names = {name for name, _ in whole.named_parameters()} | {name for name, _ in whole.named_buffers()}
    assert {name.removeprefix("weight of ") for name in wanted if name.startswith("weight of ")} == names
    manifest = read_manifest(tmp_path / "first")
    assert set(manifest.weights) == names and manifest.aliases == {"5.weight": "0.weight", "8.weight": "0.weight"}
    assert set(manifest.frozen or ()) == {"4.factor", "7.factor"}
    for sizes, more in CUTS[: 3 if precision == "bf16" else None]:
        for values, seen in run_ranks(loaded, math.prod(sizes.values()), str(tmp_path), sizes, precision, more):
            assert values.keys() == wanted.keys()
            differ = [name for name, value in wanted.items() if not torch.equal(values[name], value)]
            assert not differ, (sizes, more, differ)
            assert seen == {name: extra[name] for name in seen}
    (file,) = export(tmp_path / "first", tmp_path / "model.safetensors")
    tensors = load_file(file)
    assert all(
        torch.equal(tensors[name].float(), wanted[f"weight of {name}"].view(tensors[name].shape).float())
        for name in names
    )


def test_a_checkpoint_of_one_rank_loads_into_stages(run_ranks: Run, tmp_path: Path) -> None:
    ((wanted, extra),) = run_ranks(saved, 1, str(tmp_path), {"pipe": 1}, "fp32")
    for values, seen in run_ranks(loaded, 2, str(tmp_path), {"pipe": 2}, "fp32", {}):
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[name], value) for name, value in wanted.items())
        assert seen == {name: extra[name] for name in seen}


def whole_on_all_ranks(folder: str) -> None:
    job = Trained({"pipe": 2}, 3, "bf16", extra=False)
    job.step(0)
    found, names = job.opt.full_state_dict(), set(layers(0, extra=False).state_dict())
    assert set(found) == names and found["8.weight"] is found["0.weight"]
    every = zcomm.all_gather(torch.cat([found[name].float().reshape(-1) for name in sorted(names)])).view(2, -1)
    assert torch.equal(every[0], every[1])
    own = job.module.state_dict()
    assert names > set(own) and all(torch.equal(found[name], value) for name, value in own.items())
    job.opt.param_groups[0]["weight_decay"] = 0.5 if job.comm.rank else 0.0
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['weight_decay'\] is 0.5 on rank 1, but 0.0 on rank 0"):
        job.opt.save(f"{folder}/options")
    assert not Path(folder, "options").exists()
    job.close()
    job = Trained({"pipe": 2}, 3, "fp32")
    with pytest.raises(NotImplementedError, match=r"4\._extra_state of rank 0 is no tensor: use save"):
        job.opt.full_state_dict()
    job.close()
    mesh = zcomm.ProcessMesh(job.comm, pipe=2)
    opt = zcomm.ZeroOptimizer(nn.Linear(3, 3), "adamw", mesh=mesh, stage=1)  # a pipeline of the program's own
    with pytest.raises(RuntimeError, match="weight is the name of two tensors, of stages 0 and 1 of a pipeline"):
        opt.save(f"{folder}/names")
    opt.close()


def test_a_state_dict_of_stages_is_whole_or_an_error(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(whole_on_all_ranks, 2, str(tmp_path))
