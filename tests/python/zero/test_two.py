"""Several optimizers over one model, of any stage, tier and precision: at once, and one after the close of another.

Two at once: each steps, saves, loads and counts only its own parameters. One after another: training continues.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import nn

import zcomm
from zcomm.zero import Init, Offload, Units, full_param
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


# --- one after the other ----------------------------------------------------------------------------------------------

UNITS = {"stage": 3, "share_parameters": False}
DRIVE = {"stage": 3, "offload": Offload("nvme", "nvme")}
ROWS = {"stage": 3, "offload": Offload("nvme", "nvme"), "units": Units(max_bytes="40KiB", min_bytes=0, rows=True)}
# The first optimizer, the second, whether zero.Init has made the model.
CASES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    (DRIVE, DRIVE, True),
    (DRIVE, {"stage": 0}, False),
    ({**DRIVE, "precision": "bf16"}, {"stage": 2}, False),
    (UNITS, {**DRIVE, "precision": "bf16"}, True),
    (ROWS, UNITS, False),
    ({"stage": 1}, ROWS, False),
    ({"stage": 3, "offload": "cpu", "share_parameters": False, "bucket_mb": 0.001}, {"stage": 1}, False),
]


def network() -> nn.Sequential:
    net = nn.Sequential(nn.Embedding(3000, 8), nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 7))
    net[1].requires_grad_(False)
    return net


def train(net: nn.Module, opt: Any) -> None:
    tokens = torch.arange(12) * 250
    for _ in range(3):
        net(tokens).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def build_again(folder: str) -> None:
    """Compare with a twin that has both optimizers in stage 0: every stage and tier has the same bits."""
    comm = zcomm.init(timeout=60)
    for first, second, deferred in CASES:
        torch.manual_seed(7 + comm.rank)
        with Init(enabled=deferred, min_count=64):
            net = network()
        torch.manual_seed(7 + comm.rank)
        twin, shapes = network(), [param.shape for param in net.parameters()]
        for options in (first, second):
            opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **options)
            plain = zcomm.ZeroOptimizer(twin, "sgd", lr=0.5, precision=options.get("precision", "fp32"))
            train(net, opt)
            train(twin, plain)
            if options is second:
                found = opt.full_state_dict()
                assert all(torch.equal(found[name], value) for name, value in twin.state_dict().items()), (
                    first,
                    second,
                )
            opt.close()  # with the update that is deferred to the next forward
            plain.close()
            assert [param.shape for param in net.parameters()] == shapes


def test_a_model_has_its_weights_in_the_next_optimizer(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(build_again, 2, str(tmp_path))


def lose_weights(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for losers in ([1], [0, 1]):
        net = network()
        wanted = {name: value.clone() for name, value in net.state_dict().items()}
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **DRIVE)
        free = 0 if comm.rank in losers else 1 << 30
        with mock.patch("zcomm.zero.units.store.free_nbytes", lambda device, free=free: free):
            opt.close()
        with pytest.raises(RuntimeError, match="its ZeroOptimizer is closed"):
            net[0].weight.sum()
        words = (
            r"weight is .* not .* kept after 0 steps" if losers == [1] else "0.weight, .*: the ZeroOptimizer that had"
        )
        with pytest.raises(ValueError, match=words if comm.rank else None):
            zcomm.ZeroOptimizer(net, "sgd", lr=0.5)
        net.load_state_dict(wanted)
        zcomm.ZeroOptimizer(net, "sgd", lr=0.5).close()
        assert all(torch.equal(wanted[name], value) for name, value in net.state_dict().items())
        alone = comm.split(comm.rank)
        opt = zcomm.ZeroOptimizer(net, "sgd", lr=0.5, nvme_path=folder, **DRIVE)
        opt.close()
        with pytest.raises(ValueError, match=r"0\.weight is in shards of 2 ranks of a closed ZeroOptimizer"):
            zcomm.ZeroOptimizer(net, "sgd", lr=0.5, comm=alone)
        zcomm.ZeroOptimizer(net, "sgd", lr=0.5).close()  # the error has lost no weights
        assert all(torch.equal(wanted[name], value) for name, value in net.state_dict().items())


def test_weights_that_could_not_be_kept_are_an_error_on_all_ranks(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(lose_weights, 2, str(tmp_path))
