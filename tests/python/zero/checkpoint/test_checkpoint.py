"""Checkpoints: resumed bits; any world size, stage, tier and precision; errors name the fault."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
import zcomm.schedulers
from tiers import slow
from zcomm.zero.checkpoint import read_manifest
from zcomm.zero.files import durable
from zero_jobs import digest

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """A model with tied and frozen parameters, buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 24)
        self.blocks = nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.Linear(24, 24))
        self.scale = nn.Parameter(torch.full((24,), 0.5), requires_grad=False)
        self.head = nn.Linear(24, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(x)) * self.scale)


def build(optimizer: str, stage: int, offload: str | None, precision: str, swap: str) -> tuple[Net, Any, Any]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(7 + comm.rank)
    model = Net()
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1 and p.requires_grad], "lr": 0.02},
        {"params": [p for p in params if p.ndim == 1 and p.requires_grad]},
    ]
    classes = {"adamw": torch.optim.AdamW, "momentum": torch.optim.SGD, "nadam": torch.optim.NAdam}
    options = {"momentum": 0.9} if optimizer == "momentum" else {}
    given = classes[optimizer](groups, lr=0.01, **options)
    opt = zcomm.ZeroOptimizer(model, given, stage=stage, offload=offload, nvme_path=swap, precision=precision)
    return model, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)


def train(model: Net, opt: Any, schedule: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + zcomm.rank())
        x = torch.randint(0, 19, (8,), generator=generator)
        opt.backward(nn.functional.cross_entropy(model(x).float(), x))
        opt.step()
        opt.zero_grad()
        schedule.step()


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    return digest({name: tensor.reshape(-1) for name, tensor in tensors.items()})


def masters(model: Net) -> str:
    whole = {name: zcomm.zero.full_param(p) for name, p in model.named_parameters() if p.requires_grad}
    return digest(whole)


def everything(model: Net, opt: Any) -> dict[str, Any]:
    state = opt.state_dict()["state"]
    arrays = {f"{n}.{k}": v for n, entry in state.items() for k, v in entry.items()}
    buffers = dict(model.named_buffers())
    hashes = {"masters": masters(model), "state": hash_of(arrays), "buffers": hash_of(buffers)}
    return {**hashes, "lr": opt.param_groups[0]["lr"], "steps": opt.scaler.cur_iter if opt.scaler else opt.step_count}


def write_and_go_on(optimizer: str, stage: int, offload: str | None, precision: str, folder: str) -> tuple[Any, Any]:
    model, opt, schedule = build(optimizer, stage, offload, precision, folder)
    train(model, opt, schedule, range(4))
    opt.save(f"{folder}/ckpt", scheduler=schedule, client_state={"epoch": 3, "best": (0.5, None)})
    saved = everything(model, opt)
    train(model, opt, schedule, range(4, 8))
    return saved, everything(model, opt)


def resume(optimizer: str, places: list[Any], folder: str) -> list[tuple[Any, Any, Any]]:
    results = []
    for stage, offload, precision in places:
        model, opt, schedule = build(optimizer, stage, offload, precision, folder)
        train(model, opt, schedule, range(90, 91))  # the optimizer has other state before
        client = opt.load(f"{folder}/ckpt", scheduler=schedule)
        loaded = everything(model, opt)
        train(model, opt, schedule, range(4, 8))
        results.append((client, loaded, everything(model, opt)))
        opt.close()
    return results


@pytest.mark.parametrize(
    ("optimizer", "precision"), [("adamw", "bf16"), slow("momentum", "fp16"), slow("nadam", "fp32")]
)
def test_a_resumed_run_has_the_same_bits(run_ranks: Run, tmp_path: Path, optimizer: str, precision: str) -> None:
    folder = str(tmp_path)
    saved, ended = run_ranks(write_and_go_on, 2, optimizer, 3, "nvme", precision, folder)[0]
    places = [(3, "nvme", precision), (1, None, precision), (0, "cpu", precision)]
    for client, loaded, after in run_ranks(resume, 2, optimizer, places, folder)[0]:
        assert client == {"epoch": 3, "best": (0.5, None)}
        assert loaded == saved
        assert after == ended, "dropout, schedule and state go on as if nothing had happened"
    world_size = 3 if precision == "bf16" else 1
    other = {"fp32": "bf16", "bf16": "fp32", "fp16": "fp32"}[precision]
    places = [(2, "nvme", precision), (2, None, other)]
    (_, loaded, _), (_, converted, _) = run_ranks(resume, world_size, optimizer, places, folder)[0]
    assert loaded == saved
    assert converted["masters"] == saved["masters"], "the master is exact in every precision"


def test_files_are_safetensors_by_parameter_name(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(write_and_go_on, 2, "adamw", 2, None, "bf16", str(tmp_path))
    manifest = read_manifest(tmp_path / "ckpt")
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name in manifest.files:
        if name.endswith(".safetensors"):
            (weights if name.startswith("model") else state).update(load_file(tmp_path / "ckpt" / name))
    names = [name for name, _ in Net().named_parameters()]
    assert set(names) < set(weights) and weights["embed.weight"].dtype == torch.bfloat16
    assert manifest.aliases == {"head.weight": "embed.weight"}
    assert state["exp_avg/blocks.0.weight"].shape == (24, 24)
    exact = state["master/embed.weight"]
    assert exact.dtype == torch.float32 and not torch.equal(exact, exact.bfloat16().float())
    assert (weights["embed.weight"].float() - exact).abs().max() <= exact.abs().max() / 256
    assert "blocks.1.running_mean" in weights and "scale" in weights


def test_nobody_else_can_read_a_checkpoint(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _, opt = tiny(tmp_path, 1)
        opt.save(tmp_path / "runs" / "deep" / "c")
        durable.replace_file(tmp_path / "runs" / "latest", b"c")
        opt.close()
    finally:
        os.umask(before)
    made = list((tmp_path / "runs").rglob("*"))
    assert len(made) >= 6
    for path in (tmp_path / "runs", *made):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    zcomm.shutdown()


def tiny(folder: Path, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    return model, zcomm.ZeroOptimizer(model, "sgd", stage=1, momentum=0.9)


# --- faults are named -----------------------------------------------------------------------------------------


def try_to_load(folder: str, keyword: dict[str, Any], optimizer: str = "sgd", shape: tuple[int, int] = (5, 3)) -> str:
    model = nn.Linear(*shape)
    opt = zcomm.ZeroOptimizer(model, optimizer, stage=2, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    before = model.weight.clone()
    try:
        opt.load(f"{folder}/c", **keyword)
        return "loaded"
    except (OSError, ValueError) as error:
        assert torch.equal(model.weight, before), "nothing has changed"
        return f"{type(error).__name__}: {error}"
    finally:
        opt.close()


def test_damage_is_named_on_every_rank(run_ranks: Run, tmp_path: Path) -> None:
    _, opt = tiny(tmp_path, 1)
    opt.save(tmp_path / "c")
    opt.close()
    zcomm.shutdown()
    path = tmp_path / "c" / "optimizer-00001-of-00001.safetensors"
    whole = path.read_bytes()
    entry = read_manifest(tmp_path / "c").optimizer["momentum_buffer/weight"]
    broken = bytearray(whole)
    broken[entry.begin + 7] ^= 4
    path.write_bytes(broken)
    for said in run_ranks(try_to_load, 2, str(tmp_path), {}):
        assert "OSError" in said and path.name in said and "momentum_buffer/weight" in said
    path.write_bytes(whole[:-3])
    for said in run_ranks(try_to_load, 1, str(tmp_path), {}):
        assert f"{path.name} has {len(whole) - 3} bytes, not {len(whole)}" in said
    path.unlink()
    assert "is missing" in try_to_load(str(tmp_path), {})
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"momentum"', '"momentun"'))
    assert "the manifest is damaged: its checksum is another" in try_to_load(str(tmp_path), {})
    shutil.rmtree(tmp_path / "c")
    assert try_to_load(str(tmp_path), {}).startswith("FileNotFoundError")
    zcomm.shutdown()


def test_another_model_or_optimizer_is_listed(tmp_path: Path) -> None:
    _, opt = tiny(tmp_path, 1)
    opt.save(tmp_path / "c")
    opt.close()
    said = try_to_load(str(tmp_path), {}, shape=(6, 3))
    assert "the checkpoint is of another model; other shapes: weight: (3, 5) there, (3, 6) here" in said
    said = try_to_load(str(tmp_path), {}, optimizer="adamw")
    assert "the checkpoint has the state of sgd, which lacks exp_avg/weight" in said and "optimizer=False" in said
    assert try_to_load(str(tmp_path), {"optimizer": False}, optimizer="adamw") == "loaded"
    adamw = zcomm.ZeroOptimizer(nn.Linear(5, 3), "adamw", stage=1)
    adamw.save(tmp_path / "adamw")
    adamw.close()
    for other, said in (
        ("lion", "state of adamw, this optimizer is lion"),
        ("sgd", "this optimizer is sgd"),
        ("adam", ""),
    ):
        opt = zcomm.ZeroOptimizer(nn.Linear(5, 3), other, stage=1)
        if said:
            with pytest.raises(ValueError, match=f"{said}; load only the weights with optimizer=False"):
                opt.load(tmp_path / "adamw")
        opt.load(tmp_path / "adamw", optimizer=not said)
        opt.close()
    zcomm.shutdown()


@pytest.fixture
def told_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcomm.zero.validate._unsaved_logged", False)


def unsaved(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "gradients are not saved" in record.getMessage()]


def test_a_save_amid_an_accumulation_holds_no_gradients(
    tmp_path: Path, told_anew: None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, grad_accum=2, lr=0.1)
    want = model.weight.clone()
    for _ in range(2):
        model(torch.ones(1, 5)).sum().backward()
        opt.step()
        opt.save(tmp_path / "c")
        opt.load(tmp_path / "c")
    assert torch.equal(model.weight, want), "two halves of different accumulations make no step"
    assert len(unsaved(caplog)) == 1 and "save() after micro-step 1 of 2" in unsaved(caplog)[0]
    opt.close()
    zcomm.shutdown()


def test_passes_that_no_step_has_used_are_not_saved(
    tmp_path: Path, told_anew: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only the boundary calls ``step()``, as Accelerate does, and in ``no_sync()``."""
    model = nn.Linear(5, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, lr=0.1)
    opt.save(tmp_path / "c")
    assert unsaved(caplog) == []
    with opt.no_sync():
        model(torch.ones(1, 5)).sum().backward()
    opt.save(tmp_path / "c")
    model(torch.ones(1, 5)).sum().backward()
    opt.save(tmp_path / "c")
    assert len(unsaved(caplog)) == 1 and "a backward pass that no step() has used" in unsaved(caplog)[0]
    before = model.weight.detach().clone()
    opt.step()  # with both passes, because a save keeps pending gradients
    assert torch.allclose(model.weight, before - 0.2)
    opt.zero_grad()
    model(torch.ones(1, 5)).sum().backward()
    opt.load(tmp_path / "c")
    opt.step()
    assert torch.equal(model.weight, before), "what had begun before a load is gone"
    opt.close()
    zcomm.shutdown()


def accumulate(place: tuple[int, str | None], folder: str, saves: bool) -> dict[str, str]:
    stage, offload = place
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 7))
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=stage, offload=offload, nvme_path=folder, grad_accum=3, lr=0.1)
    found = {}
    for number in range(7):
        x = torch.full((2, 40), float(number + zcomm.rank()))
        if saves:
            opt.save(f"{folder}/{number}", wait=number % 2 == 0)
        model(x).square().mean().backward()
        if saves:
            opt.save(f"{folder}/{number}-after-backward", wait=number % 2 == 1)
        opt.step()
        opt.zero_grad()
    found["ended"] = hash_of(opt.full_state_dict())
    if saves:
        opt.load(f"{folder}/1-after-backward")
        found["no step before"] = hash_of(opt.full_state_dict())
        opt.load(f"{folder}/5-after-backward")
        found["one step before"] = hash_of(opt.full_state_dict())
    opt.close()
    zcomm.shutdown()
    return found


@pytest.mark.parametrize("place", [slow((0, None)), (1, "cpu"), slow((2, "nvme")), slow((3, None)), (3, "nvme")])
def test_training_does_not_notice_saves_amid_an_accumulation(
    run_ranks: Run, tmp_path: Path, place: tuple[int, str | None]
) -> None:
    results = []
    for saves in (True, False):
        (tmp_path / str(saves)).mkdir()
        results.append(run_ranks(accumulate, 2, place, str(tmp_path / str(saves)), saves)[0])
    assert results[0]["ended"] == results[1]["ended"]
    assert len(set(results[0].values())) == 3, "a checkpoint has the weights of the last step"


@pytest.mark.parametrize("by", ["load", "load_state_dict"])
@pytest.mark.parametrize(("kind", "how"), [("adamw", {}), ("sgd", {"momentum": 0.9, "dampening": 0.5}), ("nadam", {})])
def test_a_state_from_before_the_first_step_counts_from_zero(
    tmp_path: Path, by: str, kind: str, how: dict[str, Any]
) -> None:
    optimizer = torch.optim.NAdam if kind == "nadam" else kind
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    first = copy.deepcopy(model.state_dict())
    opt = zcomm.ZeroOptimizer(model, optimizer, lr=0.05, stage=1, **how)
    state = opt.state_dict()
    opt.save(tmp_path / "ck")
    results = []
    for _ in range(2):
        for step in range(3):
            model(torch.full((2, 6), 0.3 * step + 0.2)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        results.append(model.weight.detach().clone())
        if by == "load":
            opt.load(tmp_path / "ck")
        else:
            opt.load_state_dict(state)
            model.load_state_dict(first)
    assert torch.equal(*results)
    opt.close()
