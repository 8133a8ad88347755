"""Universal checkpoints of DeepSpeed: written, read, and loaded by an engine; with DeepSpeed itself, if possible.

ZCOMM_TEST_DEEPSPEED=PYTHON names a Python with DeepSpeed for the last kind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from places import LIBRARIES
from zcomm.cli.main import main
from zcomm.compat.deepspeed import alias
from zcomm.compat.deepspeed.checkpoint import ds_to_universal
from zcomm.convert import deepspeed_files

PYTHON = os.environ.get("ZCOMM_TEST_DEEPSPEED") or (sys.executable if importlib.util.find_spec("deepspeed") else None)
WORLD = 2


class Net(nn.Module):
    """Tied and frozen parameters, a buffer, and sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 7)
        self.body = nn.Linear(7, 7)
        self.register_buffer("seen", torch.zeros(4, dtype=torch.int64))
        self.scale = nn.Parameter(torch.ones(7), requires_grad=False)
        self.head = nn.Linear(7, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(x)) * self.scale)


def engine_of(stage: int, precision: str = "fp32", seed: int = 0, universal: bool = True, **others: Any) -> Any:
    torch.manual_seed(seed)
    model = Net()
    with torch.no_grad():
        model.scale.fill_(0.5 + seed)
        model.seen.fill_(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:1]}, {"params": trained[1:], "weight_decay": 0.5}]
    config = {
        "train_batch_size": 4 * zcomm.init().world_size,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": universal},
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **others,
    }
    return zcomm.initialize(model=model, model_parameters=groups, config=config)[0]


def go(engine: Any, steps: range) -> None:
    for step in steps:
        x = torch.randint(0, 19, (4,), generator=torch.Generator().manual_seed(step + 10 * zcomm.init().rank))
        engine.backward(nn.functional.cross_entropy(engine(x).float(), x))
        engine.step()


def contents(engine: Any) -> dict[str, torch.Tensor]:
    """Return weights, exact masters and state by name, and the rate. All ranks call it."""
    found = {name: tensor.clone() for name, tensor in engine.optimizer.full_state_dict().items()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"master/{name}"] = zcomm.zero.full_param(param)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{key}/{name}"] = zcomm.zero.full_optim_state(param, key)
    return found | {"lr": torch.tensor(engine.get_lr(), dtype=torch.float64)}


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def to_form_of_stage_3(folder: Path) -> None:
    """Give the files the form that DeepSpeed writes in stage 3: flat tensors, and the step in the optimizer's file."""
    for path in (folder / "zero").glob("*/*.pt"):
        if path.stem == "step":
            path.unlink()
        else:
            torch.save(torch.load(path)["param"].flatten(), path)
    (folder / "mp_rank_00_model_states.pt").unlink()
    path = folder / "zero" / "optimizer_state.pt"
    torch.save(torch.load(path) | {"zero_stage": 3, "partition_count": 1}, path)


@pytest.mark.parametrize(("stage", "form", "precision"), [(1, 1, "bf16"), (2, 3, "fp32"), (3, 3, "bf16")])
def test_a_run_goes_on_with_its_bits(tmp_path: Path, stage: int, form: int, precision: str) -> None:
    engine = engine_of(stage, precision)
    go(engine, range(3))
    client = {"epoch": 2, "ema": [torch.arange(3.0)], "args": Namespace(lr=1)}
    engine.save_checkpoint(tmp_path, tag="three", client_state=client)
    saved = contents(engine)
    go(engine, range(3, 6))
    expected = contents(engine)
    engine.destroy()
    out = tmp_path / "three_universal"
    ds_to_universal.main(Namespace(input_folder=str(tmp_path / "three"), output_folder=str(out)))
    if form == 3:
        to_form_of_stage_3(out)
    engine = engine_of(stage % 3 + 1, precision, seed=1)
    path, state = engine.load_checkpoint(tmp_path)  # by latest_universal
    assert path == str(out) and engine.global_steps == 3 and engine.optimizer.step_count == 3
    assert state.pop("universal_checkpoint_info") == {"universal_checkpoint_version": 0.4}
    assert state["epoch"] == 2 and torch.equal(state["ema"][0], torch.arange(3.0)) and state.keys() == {"epoch", "ema"}
    same(contents(engine), saved)
    go(engine, range(3, 6))
    same(contents(engine), expected)
    assert sorted(each.name for each in tmp_path.iterdir() if "zcomm" in each.name) == []
    engine.load_checkpoint(tmp_path, tag="three")  # one of zcomm
    same(contents(engine), saved)
    engine.destroy()
    zcomm.shutdown()


def test_the_scale_of_fp16_goes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(2, "fp16")
    go(engine, range(2))
    engine.save_checkpoint(tmp_path, tag="two")
    engine.destroy()
    assert main(["ckpt", "convert", str(tmp_path / "two"), str(tmp_path / "out"), "--to", "universal"]) == 0
    scaler = deepspeed_files._ALLOWED[2]()
    for name, value in {"cur_scale": 64.0, "cur_iter": 9, "last_overflow_iter": 4, "cur_hysteresis": 1}.items():
        setattr(scaler, name, value)
    path = tmp_path / "out" / "zero" / "optimizer_state.pt"
    with monkeypatch.context() as patch:
        place = type(scaler).__module__
        for name in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.fp16", place):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[place])["DynamicLossScaler"] = type(scaler)
        torch.save(torch.load(path) | {"loss_scaler": scaler}, path)
    engine = engine_of(1, "fp16", seed=1)
    engine.load_checkpoint(tmp_path)
    assert engine.optimizer.loss_scaler.state() == {"scale": 64.0, "hysteresis_left": 1, "good_steps": 4}
    engine.destroy()
    zcomm.shutdown()


class Evil:
    """A pickle that calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_wrong_files_are_named_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = engine_of(2)
    go(engine, range(2))
    before = contents(engine)
    engine.save_checkpoint(tmp_path, tag="two")
    assert main(["ckpt", "convert", str(tmp_path), str(tmp_path / "out"), "--to", "universal"]) == 0
    with pytest.raises(FileExistsError):
        ds_to_universal.main(Namespace(input_folder=str(tmp_path / "two"), output_folder=str(tmp_path / "out")))
    weight = tmp_path / "out" / "zero" / "body.weight" / "exp_avg.pt"
    whole = weight.read_bytes()
    for content, said in (
        (Evil(tmp_path / "ran"), "system, which is not in the allowlist"),
        ({"param": torch.ones(48)}, "expected a tensor of shape (7, 7)"),
        ({"other": 1}, "is not a ZeRO checkpoint"),
    ):
        torch.save(content, weight)
        with pytest.raises(ValueError) as raised:
            engine.load_checkpoint(tmp_path)
        assert said in str(raised.value) and str(tmp_path / "out") in str(raised.value)
    weight.write_bytes(whole)
    (weight.parent / "fp32.pt").rename(tmp_path / "away")
    with pytest.raises(ValueError, match=r"fp32\.pt is missing: body\.weight is a trained parameter"):
        engine.load_checkpoint(tmp_path)
    (tmp_path / "away").rename(weight.parent / "fp32.pt")
    model = tmp_path / "out" / "mp_rank_00_model_states.pt"
    states = torch.load(model)
    states["param_shapes"][0]["../../two"] = torch.Size([1])
    torch.save(states, model)
    with pytest.raises(ValueError, match=r"'\.\./\.\./two' is not one of a file"):
        engine.load_checkpoint(tmp_path, tag="out")
    (tmp_path / "latest_universal").unlink()
    with pytest.raises(ValueError, match="latest_universal is missing"):
        engine.load_checkpoint(tmp_path)
    same(contents(engine), before)
    assert not (tmp_path / "ran").exists()
    engine.destroy()
    assert main(["ckpt", "convert", str(tmp_path / "two"), str(tmp_path / "x"), "--torch-adam"]) == 2
    assert "--torch-adam belongs to --to universal" in capsys.readouterr().err
    zcomm.shutdown()


def _two(folder: str) -> dict[str, torch.Tensor]:
    engine = engine_of(3, seed=1)
    engine.load_checkpoint(folder)
    found = contents(engine)
    if engine.global_rank == 0:
        os.rename(f"{folder}/out", f"{folder}/away")
    zcomm.init().barrier()
    try:
        engine.load_checkpoint(folder)
    except FileNotFoundError as error:
        assert "out" in str(error)
    else:
        raise AssertionError("no error without the folder")
    engine.destroy()
    return found


def test_two_ranks_load_it(tmp_path: Path, run_ranks: Any) -> None:
    engine = engine_of(1)
    go(engine, range(2))
    engine.save_checkpoint(tmp_path, tag="two")
    expected = contents(engine)
    engine.destroy()
    zcomm.shutdown()
    assert main(["ckpt", "convert", str(tmp_path), str(tmp_path / "out"), "--to", "universal"]) == 0
    for found in run_ranks(_two, 2, str(tmp_path)):
        same(found, expected)
    assert not [each.name for each in tmp_path.iterdir() if "zcomm" in each.name]


def test_8_bit_state_is_written_in_fp32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(80, 70)
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=0.01, stage=2, state_dtype="8bit")
    model(torch.randn(4, 80)).square().sum().backward()
    opt.step()
    opt.save(tmp_path / "one")
    expected = {key: zcomm.zero.full_optim_state(model.weight, key) for key in ("exp_avg", "exp_avg_sq")}
    opt.close()
    assert main(["ckpt", "convert", str(tmp_path / "one"), str(tmp_path / "out"), "--to", "universal"]) == 0
    for key, tensor in expected.items():
        assert torch.equal(torch.load(tmp_path / "out" / "zero" / "weight" / f"{key}.pt")["param"], tensor), key
    zcomm.shutdown()


# --- with DeepSpeed ---------------------------------------------------------------------------------------------------


def run_program(python: str, paths: str | None, *args: str) -> None:
    """Run two ranks of deepspeed_universal."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(WORLD):
        env = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            **({"PYTHONPATH": paths} if paths else {}),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(WORLD),
            "LOCAL_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [python, str(LIBRARIES / "deepspeed_universal.py"), *args]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = [process.communicate(timeout=250)[0] for process in ranks]
    for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        left.unlink()
    assert [process.returncode for process in ranks] == [0, 0], said


@pytest.mark.skipif(PYTHON is None, reason="no DeepSpeed; ZCOMM_TEST_DEEPSPEED=PYTHON names a Python that has it")
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("by", ["deepspeed", "zcomm"])
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")])
def test_with_deepspeed(tmp_path: Path, stage: int, precision: str, by: str) -> None:
    """One of them saves, the other one goes on: the losses are equal, but for another order of sums."""
    ours = (sys.executable, alias.with_folder(str(Path(zcomm.__file__).parents[1])))
    theirs = (str(PYTHON), None)
    first, second = (theirs, ours) if by == "deepspeed" else (ours, theirs)
    run_program(*first, "save", str(tmp_path), str(stage), precision, "1")
    run_program(*second, "load", str(tmp_path), str(stage), precision, "1")
    saved, loaded = (json.loads((tmp_path / f"losses-{mode}.json").read_text()) for mode in ("save", "load"))
    near = 1e-6 if precision == "fp32" else 1e-4
    torch.testing.assert_close(torch.tensor(loaded), torch.tensor(saved), rtol=near, atol=0.0)
    assert loaded[0][0] == saved[0][0], "the first loss has the loaded weights only"
