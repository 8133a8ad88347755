"""Checkpoints: resumed bits; any world size, stage, tier and precision; never half a folder; what is wrong is named."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import zcomm
import zcomm.schedulers
from zcomm.zero.checkpoint import SaveTask, durable, read_manifest
from zcomm.zero.checkpoint.plain import from_json, to_json
from zero_jobs import digest

Run = Callable[..., list[Any]]


class Net(nn.Module):
    """Tied, frozen, buffered, with dropout: what people have."""

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
    return {**hashes, "lr": opt.param_groups[0]["lr"]}


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
        train(model, opt, schedule, range(90, 91))  # something else is in it before
        client = opt.load(f"{folder}/ckpt", scheduler=schedule)
        loaded = everything(model, opt)
        train(model, opt, schedule, range(4, 8))
        results.append((client, loaded, everything(model, opt)))
        opt.close()
    return results


@pytest.mark.parametrize(("optimizer", "precision"), [("adamw", "bf16"), ("momentum", "fp16"), ("nadam", "fp32")])
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


# --- never half a checkpoint ----------------------------------------------------------------------------------


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


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the program's runs afterwards."""


def tiny(folder: Path, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    return model, zcomm.ZeroOptimizer(model, "sgd", stage=1, momentum=0.9)


def test_a_kill_at_any_write_leaves_the_last_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tiny(tmp_path, 1), tiny(tmp_path, 2)
    want = {"old": old[0].weight.clone(), "new": new[0].weight.clone()}
    probe, reader = tiny(tmp_path, 3)
    rmtree = shutil.rmtree
    points: list[str] = []
    number = 0
    seen = set()
    while number == 0 or number <= len(points):
        rmtree(tmp_path / "c", ignore_errors=True)
        old[1].save(tmp_path / "c")
        points.clear()

        def at_write(what: str, stop: int = number) -> None:
            points.append(what)
            if stop == len(points):
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(durable, "before_write", at_write)
            if number:
                patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # a dead process cleans nothing
                with pytest.raises(Killed):
                    new[1].save(tmp_path / "c")
            else:
                new[1].save(tmp_path / "c")
        all_points = list(points) if number == 0 else all_points  # noqa: F821
        reader.load(tmp_path / "c")
        (which,) = [name for name, weight in want.items() if torch.equal(weight, probe.weight)]
        seen.add(which)
        assert which == "new" or number, "the save that was not killed counts"
        new[1].save(tmp_path / "c")  # and the next one works, and leaves nothing of the dead one
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
        number += 1
        points[:] = all_points
    assert seen == {"old", "new"} and len(all_points) >= 12
    for optimizer in (old[1], new[1], reader):
        optimizer.close()
    zcomm.shutdown()


def killed_for_good(folder: str) -> None:
    _, opt = tiny(Path(folder), 1)
    opt.save(f"{folder}/c", client_state="first")
    count = 0

    def at_write(what: str) -> None:
        nonlocal count
        count += 1
        if count == 4 and zcomm.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    durable.before_write = at_write
    opt.save(f"{folder}/c", client_state="second")


def test_a_rank_killed_while_saving(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(killed_for_good, 2, str(tmp_path), check=False)
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None and first.error.kind == "PeerLost"
    assert read_manifest(tmp_path / "c").client_state == "first"


def disk_full_on_one(folder: str) -> str:
    import resource

    model = nn.Sequential(nn.Linear(300, 30, bias=False), nn.Linear(30, 300, bias=False))
    opt = zcomm.ZeroOptimizer(model, stage=1)
    opt.save(f"{folder}/c", client_state="first")
    if zcomm.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    try:
        opt.save(f"{folder}/c", client_state="second")
    except OSError as error:
        assert error.errno == errno.EFBIG
        return str(error)
    return "no error"


def test_a_rank_that_cannot_write_fails_all(run_ranks: Run, tmp_path: Path) -> None:
    first, second = run_ranks(disk_full_on_one, 2, str(tmp_path))
    assert "File too large" in first + second
    assert "failed on rank 1" in first and "model-00002-of-00002.safetensors" in second
    assert read_manifest(tmp_path / "c").client_state == "first"
    assert [path.name for path in tmp_path.iterdir() if "saving" in path.name] == []


def save_while_training(folder: str) -> tuple[Any, Any, Any]:
    comm = zcomm.init(timeout=2)
    model, opt, schedule = build("adamw", 2, "nvme", "bf16", folder)
    train(model, opt, schedule, range(2))
    at_save = everything(model, opt)

    def slow(what: str) -> None:
        if comm.rank == 1 and what.startswith("sync model"):
            time.sleep(3)  # longer than the deadline

    durable.before_write = slow
    task = opt.save(f"{folder}/ckpt", scheduler=schedule, wait=False)
    train(model, opt, schedule, range(2, 4))
    assert not task.done() and not os.path.exists(f"{folder}/ckpt")
    task.wait()
    later = everything(model, opt)
    opt.save(f"{folder}/ckpt2", wait=False)
    durable.before_write = lambda what: None
    opt.load(f"{folder}/ckpt", scheduler=schedule)
    loaded = everything(model, opt)
    opt.save(f"{folder}/ckpt3", wait=False)
    opt.close()  # waits
    assert read_manifest(Path(folder) / "ckpt2") and read_manifest(Path(folder) / "ckpt3")
    return at_save, later, loaded


def test_training_goes_on_while_a_slow_drive_saves(run_ranks: Run, tmp_path: Path) -> None:
    for at_save, later, loaded in run_ranks(save_while_training, 2, str(tmp_path)):
        assert later != at_save
        for values in (loaded, at_save):
            del values["buffers"]  # those of rank 0 are saved
        assert loaded == at_save


def engine_saves_while_training(folder: str) -> list[bool]:
    torch.manual_seed(1)
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    one, _, _, _ = zcomm.initialize(model=nn.Linear(5, 3), config={**config, "zero_optimization": {"stage": 2}})
    drive = threading.Event()

    def slow(what: str) -> None:
        if not what.startswith("sync folder"):
            assert drive.wait(60)

    def step() -> None:
        one.backward(one(torch.ones(2, 5)).square().mean())
        one.step()

    step()
    seen = [one.module.weight.detach().clone()]
    durable.before_write = slow
    tasks = []
    for save in (
        lambda: one.save_checkpoint(folder, wait=False),
        lambda: one.save_16bit_model(f"{folder}/export", wait=False),
    ):
        drive.clear()
        task = save()
        assert isinstance(task, SaveTask)
        step()
        step()
        seen.append(one.module.weight.detach().clone())
        tasks.append(task.done())  # the drive has not moved: training did
        drive.set()
        task.wait()
    assert not torch.equal(seen[0], seen[1])
    assert (Path(folder) / "latest").read_text() == "global_step1"
    exported = load_file(f"{folder}/export/model.safetensors")
    assert torch.equal(exported["weight"], seen[1]), "as it was when save_16bit_model was called"
    one.load_checkpoint(folder)
    assert torch.equal(one.module.weight, seen[0]) and one.global_steps == 1

    def full(what: str) -> None:
        if zcomm.rank() == 0:
            raise OSError(errno.ENOSPC, "the drive is full")

    durable.before_write = full
    failing = one.save_16bit_model(f"{folder}/export2", wait=False)
    step()
    assert isinstance(failing, SaveTask)
    with pytest.raises(OSError, match="the drive is full") as told:
        failing.wait()
    assert told.value.errno == errno.ENOSPC and not os.path.exists(f"{folder}/export2/model.safetensors")
    durable.before_write = lambda what: None
    one.destroy()
    return tasks


def test_an_engine_trains_while_it_saves_and_exports(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(engine_saves_while_training, 2, str(tmp_path)) == [[False, False], [False, False]]


def test_a_save_can_be_awaited(tmp_path: Path) -> None:
    """The event loop goes on while the drive is busy."""
    _, opt = tiny(tmp_path, 1)
    drive = threading.Event()

    async def main() -> list[str]:
        durable.before_write = lambda what: drive.wait(60)
        task = opt.save(tmp_path / "c", wait=False)
        seen = []

        async def other() -> None:
            seen.append("other")
            drive.set()

        beside = asyncio.create_task(other())
        await task
        seen.append("saved")
        await beside
        return seen

    try:
        assert asyncio.run(main()) == ["other", "saved"]
    finally:
        durable.before_write = lambda what: None
    assert read_manifest(tmp_path / "c")
    opt.close()
    zcomm.shutdown()


# --- what is wrong is named -----------------------------------------------------------------------------------


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
            with pytest.raises(ValueError, match=f"{said}; load the weights alone with optimizer=False"):
                opt.load(tmp_path / "adamw")
        opt.load(tmp_path / "adamw", optimizer=not said)
        opt.close()
    zcomm.shutdown()


def test_an_accumulation_cannot_be_saved_and_load_ends_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, grad_accum=2, lr=0.1)
    opt.save(tmp_path / "c")
    want = model.weight.clone()
    for _ in range(2):
        model(torch.ones(1, 5)).sum().backward()
        opt.step()
        with pytest.raises(RuntimeError, match="micro-step 1 of 2"):
            opt.save(tmp_path / "d")
        opt.load(tmp_path / "c")
    assert torch.equal(model.weight, want), "two halves of different accumulations make no step"
    opt.close()
    zcomm.shutdown()


def test_passes_that_no_step_has_used_cannot_be_saved(tmp_path: Path) -> None:
    """Also where ``step()`` is called at the boundary alone, as Accelerate does, and in ``no_sync()``."""
    model = nn.Linear(5, 3)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, lr=0.1)
    for number in range(2):
        with opt.no_sync() if number else contextlib.nullcontext():
            model(torch.ones(1, 5)).sum().backward()
        with pytest.raises(RuntimeError, match=r"no step\(\) has used.*: gradients are not saved"):
            opt.save(tmp_path / "c")
        if not number:
            model(torch.ones(1, 5)).sum().backward()
            opt.step()
            opt.save(tmp_path / "c")  # before zero_grad(), too
        opt.zero_grad()
        opt.save(tmp_path / "c")
    model(torch.ones(1, 5)).sum().backward()
    opt.load(tmp_path / "c")
    opt.save(tmp_path / "c")
    opt.close()
    zcomm.shutdown()


def test_client_state_must_be_plain(tmp_path: Path) -> None:
    _, opt = tiny(tmp_path, 1)
    with pytest.raises(ValueError, match=r"client_state\.model is Linear"):
        opt.save(tmp_path / "c", client_state={"model": nn.Linear(1, 1)})
    assert not (tmp_path / "c").exists()
    state = {"n": 3, 4: "four", "t": (1, [2.5, None]), "inf": float("inf"), "np": torch.tensor(2.5)}
    opt.save(tmp_path / "c", client_state=state)
    assert opt.load(tmp_path / "c") == {**state, "np": 2.5}
    opt.close()
    zcomm.shutdown()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one cycle of torch": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]),
    "one cycle": lambda o: zcomm.schedulers.OneCycle(o, 0.1, 0.2, cycle_first_step_size=3),
    "warm-up": lambda o: zcomm.schedulers.WarmupCosineLR(o, 9, warmup_num_steps=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_through_json(name: str) -> None:
    seen = []
    for resumed in (False, True):
        opt = torch.optim.AdamW([torch.zeros(1)], lr=0.01)
        schedule = SCHEDULES[name](opt)
        for step in range(8):
            opt.step()
            schedule.step()
            if resumed and step == 3:
                saved = json.loads(json.dumps(to_json(schedule.state_dict(), "scheduler")))
                group = opt.param_groups[0]
                opt = torch.optim.AdamW([torch.zeros(1)], lr=0.01)
                schedule = SCHEDULES[name](opt)
                opt.param_groups[0].update(group)
                schedule.load_state_dict(from_json(saved))
            seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]))
    assert seen[:8] == seen[8:]


# --- the engine -----------------------------------------------------------------------------------------------


def engine(folder: Path) -> Any:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2},
    }
    return zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]


def go(one: Any, steps: int) -> None:
    for number in range(one.global_steps + 1, one.global_steps + 1 + steps):
        before, rates = one.module.weight.detach().clone(), one.get_lr()
        one.backward(one(torch.full((4, 4), float(number))).square().mean())
        one.step()
        assert one.global_steps == number
        assert torch.equal(one.module.weight, before) == (rates == [0.0]), "warm-up begins at 0"
    assert one.get_lr() > [0.0]


def test_an_engine_goes_on_amid_its_data(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        data = torch.utils.data.TensorDataset(torch.arange(96.0).view(24, 4) / 100)
        config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        return zcomm.initialize(model=model, config=config, training_data=data)

    def run(one: Any, loader: Any, steps: int) -> None:
        while steps:
            for (x,) in loader:
                one.backward(one(x).square().mean())
                one.step()
                steps -= 1
                if one.global_steps == 8:
                    one.save_checkpoint(tmp_path)
                if not steps:
                    break

    whole, _, loader, _ = make()
    run(whole, loader, 15)  # 6 steps are an epoch
    resumed, _, loader, _ = make()
    resumed.load_checkpoint(tmp_path)
    assert resumed.global_steps == 8 and loader.state_dict() == {"epoch": 1, "samples": 8}
    run(resumed, loader, 7)
    for mine, wanted in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    for each in (whole, resumed):
        each.destroy()
    zcomm.shutdown()


def test_engine_checkpoints_in_deepspeeds_terms(tmp_path: Path) -> None:
    one = engine(tmp_path)
    assert one.load_checkpoint(tmp_path / "none") == (None, None)
    go(one, 3)
    assert one.save_checkpoint(tmp_path, client_state={"epoch": 1})
    go(one, 2)
    one.save_checkpoint(tmp_path, tag="best", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step3"
    wanted = one.module.weight.clone(), one.get_lr()
    two = engine(tmp_path)
    assert two.load_checkpoint(tmp_path) == (str(tmp_path / "global_step3"), {"epoch": 1})
    assert (two.global_steps, two.micro_steps, two.global_samples) == (3, 3, 12)
    go(two, 2)
    assert torch.equal(two.module.weight, wanted[0]) and two.get_lr() == wanted[1]
    two.load_checkpoint(tmp_path, "global_step3", load_module_only=True)
    assert two.global_steps == 5
    assert not torch.equal(two.module.weight, wanted[0])
    two.save_16bit_model(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(saved["weight"], two.module.weight)
    with pytest.raises(ValueError, match="plain folder name"):
        two.save_checkpoint(tmp_path, tag="a/b")
    for name in ("latest", "..", ""):
        with pytest.raises(ValueError, match="plain folder name"):
            two.save_checkpoint(tmp_path, tag=name)
    assert two.save_checkpoint(tmp_path, tag=7) and (tmp_path / "latest").read_text() == "7"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["7", "best", "export", "global_step3"]
    for each in (one, two):
        each.destroy()
    zcomm.shutdown()
